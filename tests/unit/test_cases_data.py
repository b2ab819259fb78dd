"""The cases as data: complete, and none without a check."""

import json

from tests.cases.checks import CHECKS
from tests.cases.expect import CHECK_KEYS
from tests.cases.runner import load_cases
from tests.cases.servers import Servers

CASES = load_cases()


def test_every_case_says_what_is_expected_and_has_a_check() -> None:
    assert len(CASES) == 181
    for case in CASES.values():
        assert case.expect
        assert case.check or case.id in CHECKS, case.id


def test_every_check_belongs_to_a_case() -> None:
    assert set(CHECKS) <= set(CASES)


def test_checks_say_only_what_is_looked_at(tmp_path) -> None:
    kinds = Servers(tmp_path).names
    for case in CASES.values():
        for step in case.steps:
            assert set(step.check or {}) <= CHECK_KEYS
            assert step.needs in kinds
            assert step.when in ("first", "before", "concurrent", "after")


def test_no_placeholder_is_left_but_those_that_are_derived() -> None:
    for case in CASES.values():
        for step in case.steps:
            sent = json.dumps(step.body) + str(step.raw)
            for name in step.derive:
                sent = sent.replace(f"<<{name}>>", "")
            # One prompt holds this very mark.
            assert "<<" not in sent.replace("<<END>>", "").replace("answer is <<", "").replace('"<< "', "")
