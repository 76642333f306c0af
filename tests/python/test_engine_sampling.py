"""One row of logits to one token."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from kvfolio.serving import SamplingParams  # noqa: E402
from kvfolio.serving.sampling import sample  # noqa: E402


def frequencies(logits: list[float], draws: int = 4000, **params: float) -> list[float]:
    generator = torch.Generator().manual_seed(3)
    options = SamplingParams(**{"temperature": 1.0, **params})  # type: ignore[arg-type]
    tokens = [sample(torch.tensor(logits), options, generator) for _ in range(draws)]
    return [tokens.count(token) / draws for token in range(len(logits))]


def test_greedy_takes_the_first_of_the_likeliest_and_no_random_number() -> None:
    generator = torch.Generator().manual_seed(0)
    state = generator.get_state()
    assert sample(torch.tensor([0.0, 2.0, 2.0, -1.0]), SamplingParams(), generator) == 1
    assert torch.equal(generator.get_state(), state)


def test_samples_follow_the_softmax_at_the_temperature() -> None:
    logits = [1.0, 0.0, -1.0]
    for temperature in (0.5, 1.0, 2.0):
        expected = torch.softmax(torch.tensor(logits) / temperature, dim=0).tolist()
        assert frequencies(logits, temperature=temperature) == pytest.approx(expected, abs=0.03)


def test_top_k_keeps_the_k_likeliest_in_their_proportions() -> None:
    expected = [0.0, *torch.softmax(torch.tensor([2.0, 1.5]), dim=0).tolist(), 0.0]
    assert frequencies([1.0, 2.0, 1.5, 0.0], top_k=2) == pytest.approx(expected, abs=0.03)
    assert frequencies([1.0, 2.0, 1.5, 0.0], draws=50, top_k=1) == [0, 1, 0, 0]
    assert min(frequencies([0.0, 0.0], top_k=9)) > 0.4


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    logits = torch.tensor([0.1, 0.5, 0.3, 0.1]).log().tolist()
    assert frequencies(logits, draws=50, top_p=0.49) == [0, 1, 0, 0]
    assert frequencies(logits, top_p=0.7) == pytest.approx([0, 5 / 8, 3 / 8, 0], abs=0.03)
    # Of what top_k leaves (5/8 and 3/8), the likeliest alone reaches 0.6.
    assert frequencies(logits, draws=50, top_k=2, top_p=0.6) == [0, 1, 0, 0]


def test_top_p_looks_beyond_the_first_candidates_where_the_distribution_is_flat() -> None:
    flat = torch.arange(5000, dtype=torch.float64) * -1e-5
    reaching = int((torch.softmax(flat, dim=0).cumsum(dim=0) < 0.9).sum()) + 1
    generator = torch.Generator().manual_seed(1)
    tokens = {sample(flat, SamplingParams(temperature=1.0, top_p=0.9), generator) for _ in range(400)}
    assert len(tokens) > 350
    assert reaching - 200 < max(tokens) < reaching


def test_every_sampled_token_takes_one_number_of_the_generator() -> None:
    """So the n-th token's number does not depend on the n - 1 before it, nor on the cuts."""
    for params in ({}, {"top_k": 2}, {"top_p": 0.5}):
        used, counted = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
        sample(torch.tensor([0.0, 1.0, 2.0]), SamplingParams(temperature=1.0, **params), used)
        torch.rand((), generator=counted, dtype=torch.float64)
        assert torch.equal(used.get_state(), counted.get_state())


def test_masked_tokens_are_never_drawn() -> None:
    assert frequencies([0.0, float("-inf"), 0.0])[1] == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("logits", [[0.0, float("nan")], [0.0, float("inf")], [-float("inf")] * 2])
def test_logits_that_are_no_numbers_are_an_error(temperature: float, logits: list[float]) -> None:
    with pytest.raises(FloatingPointError):
        sample(torch.tensor(logits), SamplingParams(temperature=temperature), torch.Generator())


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}])
def test_the_least_temperature_is_greedy(options: dict[str, float]) -> None:
    coldest = SamplingParams(temperature=1e-308, **options)  # type: ignore[arg-type]
    assert {sample(torch.tensor([5.0, 9.0, -3.0, 8.9]), coldest, torch.Generator()) for _ in range(20)} == {1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("n", 0),
        ("seed", -1),
        ("seed", 2**63),
        ("stop", ["a", ""]),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})  # type: ignore[arg-type]


def test_stop_must_not_be_one_string() -> None:
    with pytest.raises(TypeError, match="stop"):
        SamplingParams(stop="ab")
