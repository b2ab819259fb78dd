"""Linear layers on the CPU with their weights in oneDNN's own layout.

A decode step multiplies a few rows with every weight of the model. For so few rows torch's ``mm`` reaches a
third of the memory's bandwidth, and for one row it uses one core only. oneDNN's product with weights that
were reordered once is two to three times as fast, for prompts half as fast again, and rounds as well.
"""

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

EXPECTED_ROWS = 16
"""For how many rows the layout is chosen; it is good for one and for hundreds."""

TOLERANCE = 1e-4
"""Of a product with standard normal inputs, relative to its largest value."""


class PackedLinear(nn.Module):  # type: ignore[misc]
    """Computes what ``nn.Linear`` does. The plain weight stays, for code that looks at it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), EXPECTED_ROWS)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return ``hidden @ weight.T + bias``."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self._packed, self.bias, "none", [], "")
        return product


def pack_linears(model: nn.Module) -> int:
    """Replace the float32 linear layers of a model on the CPU by packed ones.

    It takes as much memory again as the weights of those layers. Layers that are hooked, quantized or
    subclassed stay as they are, and so does everything if this build of torch cannot do it, or rounds worse.

    Returns:
        How many layers were replaced.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    checked: set[tuple[int, int]] = set()
    num = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if not _can_pack(child):
                continue
            assert isinstance(child, nn.Linear)
            try:
                packed = PackedLinear(child)
                shape = (child.in_features, child.out_features)
                if shape not in checked and not _agrees(child, packed):
                    logger.warning("packed weights round differently here", extra={"layer": name})
                    return num
            except (AttributeError, RuntimeError) as error:
                logger.warning("linear layers stay unpacked", extra={"reason": str(error)})
                return num
            checked.add(shape)
            setattr(parent, name, packed)
            num += 1
    return num


def _can_pack(module: nn.Module) -> bool:
    return (
        type(module) is nn.Linear
        and module.weight.device.type == "cpu"
        and module.weight.dtype == torch.float32
        and not hasattr(module, "_hf_hook")
    )


def _agrees(linear: nn.Linear, packed: PackedLinear) -> bool:
    """Tell whether both give the same product for a few rows."""
    with torch.inference_mode():
        rows = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0))
        expected = linear(rows)
        gap = (packed(rows) - expected).abs().amax() / expected.abs().amax().clamp(min=1e-6)
    return bool(gap <= TOLERANCE)
