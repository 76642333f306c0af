"""A small continuous-batching engine over any Hugging Face causal LM.

One request, token by token::

    engine = Engine(model, num_blocks=512, block_size=16, max_sequences=8, tokenizer=tokenizer)
    request = engine.submit(prompt_token_ids, SamplingParams(max_tokens=64))
    for event in engine.stream(request):
        print(event.text, end="", flush=True)

The engine is also the model of how to use the rest of the package: whoever writes a loop of their own begins
by reading `engine.py`, `flight.py` for one step of it, and `hf_model.py` for how a model comes to write and
read the cache.

Beam search finds the likeliest answers, with beams that share blocks::

    result = beam_search(model, prompts, num_beams=4, max_tokens=64)
"""

from __future__ import annotations

try:
    import torch as _torch  # noqa: F401
    import transformers as _transformers  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "kvfolio.serving needs torch and transformers: pip install 'kvfolio[serving]'"
    ) from error

from kvfolio.verdict import Binding, Load, Verdict, judge

from .beam_search import BeamSearchResult, beam_search
from .engine import Engine
from .errors import RequestRefused, UnsupportedModel
from .figures import Distribution, EngineStats, RequestFigures
from .hypotheses import Beam
from .prompt_lookup import PromptLookup
from .reference import Comparison, compare_with_generate
from .request import Answer, Event, FinishReason, Request
from .sampling import SamplingParams
from .speculation import Drafter

__all__ = [
    "Answer",
    "Beam",
    "BeamSearchResult",
    "Binding",
    "Comparison",
    "Distribution",
    "Drafter",
    "Engine",
    "EngineStats",
    "Event",
    "FinishReason",
    "Load",
    "PromptLookup",
    "Request",
    "RequestFigures",
    "RequestRefused",
    "SamplingParams",
    "UnsupportedModel",
    "Verdict",
    "beam_search",
    "compare_with_generate",
    "judge",
]
