"""What a rank needs beside the KV: weights and activations, and where each number is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .deployment import Deployment
from .model_shape import ModelShape
from .weights import bytes_per_parameter, estimate_activations, estimate_parameters

Origin = Literal["given", "files", "estimated"]


@dataclass(frozen=True)
class Reserve:
    """Bytes on each rank of a stage; their origin: given, the size of the weights' files, or estimated."""

    weights: int
    weights_origin: Origin
    activations: int
    activations_origin: Origin


def reserves(
    shape: ModelShape, deployment: Deployment, weight_bytes: int | None, stages: tuple[range, ...]
) -> tuple[tuple[Reserve, ...], list[str]]:
    """The reserve of each stage, and notes.

    Weights are split over the stages as the estimate of the parameters is, and evenly over a stage's ranks.
    """
    parameters = estimate_parameters(shape)
    notes: list[str] = []
    weights, weights_origin = deployment.weights, "given"
    if weights is None:
        weights, weights_origin = weight_bytes, "files"
    if weights is None:
        each, note = bytes_per_parameter(shape)
        weights, weights_origin = round(parameters.total * each), "estimated"
        notes += [note] if note else []
    activations, activations_origin = deployment.activations, "given"
    if activations is None:
        activations = estimate_activations(shape, deployment.tokens_per_step, deployment.tensor_parallel)
        activations_origin = "estimated"
    found = []
    for number, layers in enumerate(stages):
        held = sum(parameters.layers[layer] for layer in layers)
        held += parameters.embedding * (number == 0) + parameters.head * (number == len(stages) - 1)
        share = -(-weights * held // (parameters.total * deployment.tensor_parallel))
        found.append(Reserve(share, weights_origin, activations, activations_origin))  # type: ignore[arg-type]
    return tuple(found), notes
