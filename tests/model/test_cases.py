"""Faults seen in servers like this one, each as a request to a real server and what must come back.

The cases are data (``tests/cases/requests.jsonl``). Those that do not mind company run in the
background, some at a time; each test then looks at the answers of its own case.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import pytest

from tests.cases.checks import CHECKS, World
from tests.cases.expect import check_answer
from tests.cases.runner import Run, load_cases, run_case, wait_idle
from tests.cases.servers import Servers

CASES = load_cases()
AT_ONCE = 8

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

RunOf = Callable[[str], Run]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("cases"))
    yield servers
    servers.stop()


@pytest.fixture(scope="module")
def world(servers: Servers) -> World:
    return World(servers)


@pytest.fixture(scope="module")
def run_of(request: pytest.FixtureRequest, servers: Servers) -> Iterator[RunOf]:
    wanted = [
        item.callspec.params["case_id"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == "test_case"
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        futures: dict[str, Future[Run]] = {
            case_id: pool.submit(run_case, CASES[case_id], servers)
            for case_id in wanted
            if not CASES[case_id].is_alone
        }

        def run_of(case_id: str) -> Run:
            if case_id in futures:
                return futures[case_id].result()
            wait(futures.values())
            wait_idle(servers(CASES[case_id].steps[0].needs))
            return run_case(CASES[case_id], servers)

        yield run_of


def test_the_facts_assumed_of_the_model_hold(servers: Servers, world: World) -> None:
    (case,) = [case for case in CASES.values() if case.id == "BL-146a"]
    card = run_case(case, servers)[0].json
    assert (card["vocab_size"], card["tokenizer_vocab_size"]) == (49152, 49152)
    assert card["max_model_len"] == 8192
    tokenizer = world.reference.tokenizer
    assert [tokenizer.convert_ids_to_tokens(each) for each in (0, 1, 2)] == [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2


@pytest.mark.parametrize("case_id", CASES)
def test_case(case_id: str, run_of: RunOf, servers: Servers, world: World) -> None:
    case = CASES[case_id]
    run = run_of(case_id)
    for number, step in enumerate(case.steps):
        for answer in run.answers[number]:
            breaks = "stall" in step.client or step.needs == "failing step"
            assert breaks or answer.failure is None
            check_answer(answer, step.check, servers(step.needs).model)
    if case_id in CHECKS:
        CHECKS[case_id](run, world)
