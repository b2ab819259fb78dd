"""The line on how far a capture is."""

from logitwire.capture.running import Counts
from logitwire.cli.progress import line


def test_rates_are_of_this_run_and_prompts_of_all_runs() -> None:
    counts = Counts(num_answers=9, num_failures=1, num_rows=500, num_bytes=50_000_000)
    said = line(counts, num_before=30, num_all=140, elapsed_s=20.0)
    assert said == "40/140 prompts, 500 rows, 25.0 rows/s, 2.5 MB/s, ETA 3:20"


def test_nothing_is_foretold_before_the_first_answer() -> None:
    assert line(Counts(num_rows=3), num_before=2, num_all=4, elapsed_s=1.0).endswith("ETA unknown")


def test_the_last_line_says_how_long_it_took() -> None:
    said = line(Counts(num_answers=2), num_before=2, num_all=4, elapsed_s=3725.0)
    assert said.endswith("4/4 prompts, 0 rows, 0.0 rows/s, 0.0 MB/s, in 1:02:05")
