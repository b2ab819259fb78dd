import logitwire


def test_public_names_are_sorted_and_there() -> None:
    assert logitwire.__all__ == sorted(logitwire.__all__, key=lambda name: (not name[0].isupper(), name))
    assert all(hasattr(logitwire, name) for name in logitwire.__all__)
