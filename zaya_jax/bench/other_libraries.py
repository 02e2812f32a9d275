"""What other libraries offer for the operations of `pallas_kernels`, for `zaya bench kernels`.

A library that is not here, or not for this device, is named as absent with the reason. Nothing of
them is imported before the benchmark runs.

Letters: B batch, T time, P rows, D width.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.choice import platform_of

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Other:
    """An operation by another library.

    Attributes:
      name: in the table.
      absent: why it cannot run here; empty if it can.
      make: from the case's arguments, a call for the results and one for these and the gradients
        of their sum, or None where it has none. Results are in the order of the kernel's.
    """

    name: str
    absent: str
    make: Callable[..., tuple[Call, Call | None]]


def others(operation: str) -> list[Other]:
    """What there could be for an operation of the catalogue, here or absent."""
    return OTHERS.get(operation, lambda: [])()


def _attention() -> list[Other]:
    return [
        Other(name="cuDNN (jax.nn)", absent=_not_on("cuda"), make=functools.partial(_jax_attention, "cudnn")),
        Other(name="jax.nn", absent="", make=functools.partial(_jax_attention, "xla")),
        Other(name="torch SDPA", absent=_torch_absent(), make=_torch_attention),
        Other(name="tokamax", absent=_missing("tokamax"), make=_tokamax_attention),
    ]


def _decode_attention() -> list[Other]:
    return [Other(name="torch SDPA", absent=_torch_absent(), make=_torch_decode)]


def _grouped_matmul() -> list[Other]:
    return [
        Other(name="torch grouped_mm", absent=_torch_absent("grouped_mm"), make=_torch_grouped),
        Other(name="tokamax", absent=_missing("tokamax"), make=_tokamax_grouped),
    ]


def _cross_entropy() -> list[Other]:
    return [
        Other(
            name="torch fused linear", absent=_torch_absent("linear_cross_entropy"), make=_torch_cross_entropy
        ),
        Other(name="Liger", absent=_missing("liger_kernel") or _not_on("cuda", "rocm"), make=_liger),
    ]


OTHERS = {
    "flash_attention": _attention,
    "decode_attention": _decode_attention,
    "grouped_matmul": _grouped_matmul,
    "cross_entropy": _cross_entropy,
}
"""By operation. Of the others, fused as they are here, no library that we know has one."""


def _missing(module: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


def _not_on(*platforms: str) -> str:
    here = platform_of(jax.devices()[0])
    return "" if here in platforms else f"it has none for {here}"


def _torch_absent(function: str = "scaled_dot_product_attention") -> str:
    if missing := _missing("torch"):
        return missing
    import torch

    if not hasattr(torch.nn.functional, function):
        return f"torch {torch.__version__} has no {function}"
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return ""


def _jitted(function: Callable[..., Any], arguments: tuple[Any, ...], num_differentiated: int) -> Any:
    """Both calls of a function of JAX with one result."""
    first, rest = arguments[:num_differentiated], arguments[num_differentiated:]

    @jax.jit
    def both(first, rest):
        result, pull_back = jax.vjp(lambda *first: function(*first, *rest), *first)
        return result, pull_back(jnp.ones_like(result))

    return functools.partial(jax.jit(function), *arguments), functools.partial(both, first, rest)


def _jax_attention(library: Any, q_BTNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    """With one document a row, as the catalogue's arguments are."""
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=library)
    return _jitted(attend, (q_BTNH, k_BSKH, v_BSKH), 3)


def _tokamax_attention(q_BTNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    import tokamax  # pyright: ignore[reportMissingImports]

    attend = functools.partial(tokamax.dot_product_attention, is_causal=True)
    return _jitted(attend, (q_BTNH, k_BSKH, v_BSKH), 3)


def _tokamax_grouped(rows_PD, weights_EDF, group_sizes_E) -> tuple[Call, Call | None]:
    import tokamax  # pyright: ignore[reportMissingImports]

    return _jitted(tokamax.ragged_dot, (rows_PD, weights_EDF, group_sizes_E), 2)


def _without_logsumexp(both: Call) -> Call:
    """Marks that the kernel's second result is not given."""

    def call():
        loss, gradients = both()
        return loss, None, gradients

    return call


class TorchResult:
    """Tensors that become arrays only when they are looked at, not while they are timed."""

    def __init__(self, tensors: Any):
        self.tensors = tensors

    def arrays(self) -> list[jax.Array | None]:
        """In the order of the kernel's results; None for what torch does not give."""
        return [None if x is None else jnp.asarray(x.detach().float().cpu().numpy()) for x in self.tensors]


def _torch_calls(function: Callable[..., Any], tensors: list[Any], *, skipped: int = 0) -> tuple[Call, Call]:
    """Both calls of a function of torch.

    Args:
      function: of the tensors, to one result.
      tensors: that take gradients.
      skipped: results of the kernel behind the first that torch does not give.
    """
    import torch

    def wait() -> None:
        if tensors[0].is_cuda:
            torch.cuda.synchronize()

    @torch.no_grad()
    def forward():
        result = function(*tensors)
        wait()
        return TorchResult([result])

    def both():
        result = function(*(x.requires_grad_() for x in tensors))
        gradients = torch.autograd.grad(result, tensors, torch.ones_like(result))
        wait()
        return TorchResult([result, *[None] * skipped, *gradients])

    return forward, both


def _to_torch(x: jax.Array) -> Any:
    import torch

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if jnp.issubdtype(x.dtype, jnp.integer):
        return torch.from_numpy(np.array(x)).to(device)
    return torch.from_numpy(np.array(x, np.float32)).to(device, getattr(torch, x.dtype.name))


def _torch_attention(q_BTNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    from torch.nn.functional import scaled_dot_product_attention

    def attend(*tensors):
        heads_first = (x.transpose(1, 2) for x in tensors)
        return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    return _torch_calls(attend, [_to_torch(x) for x in (q_BTNH, k_BSKH, v_BSKH)])


def _torch_decode(q_BNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    """All slots are full, as the catalogue's arguments are."""
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v):
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    return _torch_calls(attend, [_to_torch(x) for x in (q_BNH, k_BSKH, v_BSKH)])[0], None


def _torch_grouped(rows_PD, weights_EDF, group_sizes_E) -> tuple[Call, Call | None]:
    """Groups fill all rows, as in the catalogue's arguments: what torch leaves behind them is undefined."""
    import torch

    offsets = _to_torch(jnp.cumsum(group_sizes_E, dtype=jnp.int32))

    def multiply(rows, weights):
        return torch.nn.functional.grouped_mm(rows, weights, offs=offsets)

    return _torch_calls(multiply, [_to_torch(rows_PD), _to_torch(weights_EDF)])


def _torch_cross_entropy(hidden_PD, table_VD, targets_P, _) -> tuple[Call, Call | None]:
    """Liger's way, in torch: chunks of tokens, gradients in the forward pass. All rows count the same."""
    import torch

    targets = _to_torch(targets_P).long()

    def loss(hidden, table):
        return torch.nn.functional.linear_cross_entropy(
            hidden, table, targets, reduction="sum", options=torch.nn.LinearCrossEntropyOptions()
        )

    return _torch_calls(loss, [_to_torch(hidden_PD), _to_torch(table_VD)], skipped=1)


def _liger(hidden_PD, table_VD, targets_P, _) -> tuple[Call, Call | None]:
    from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
        LigerFusedLinearCrossEntropyLoss,
    )

    targets, fused = _to_torch(targets_P).long(), LigerFusedLinearCrossEntropyLoss(reduction="sum")
    tensors = [_to_torch(hidden_PD), _to_torch(table_VD)]
    return _torch_calls(lambda hidden, table: fused(table, hidden, targets), tensors, skipped=1)
