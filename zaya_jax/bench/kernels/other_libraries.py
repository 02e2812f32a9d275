"""Implementations of the operations of `pallas_kernels` in other libraries, for `zaya bench kernels`.

A library that is not installed, or does not support this device, is reported with the reason. No library is
imported before its benchmark runs.

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
class OtherImplementation:
    """An operation in another library.

    Attributes:
      name: name in the table.
      absent: reason why it cannot run here; empty if it can.
      make: function from the case's arguments to two calls: one for the results, and one for the results and
        the gradients of their sum, or None if there are no gradients. Results are in the order of the
        kernel's.
    """

    name: str
    absent: str
    make: Callable[..., tuple[Call, Call | None]]


def others(operation: str) -> list[OtherImplementation]:
    """Returns the implementations of a catalog operation in other libraries, including absent ones."""
    return [
        # Only now, because finding out what torch supports imports it.
        OtherImplementation(name=name, absent=absent(), make=make)
        for name, absent, make in OTHERS.get(operation, ())
    ]


def _missing(module: str) -> str:
    return "" if importlib.util.find_spec(module) else f"{module} is not installed"


def _not_on(*platforms: str) -> str:
    here = platform_of(jax.devices()[0])
    return "" if here in platforms else f"it has none for {here}"


def _torch_absent(function: str) -> str:
    if missing := _missing("torch"):
        return missing
    import torch

    if not hasattr(torch.nn.functional, function):
        return f"torch {torch.__version__} has no {function}"
    # Otherwise torch on the CPU would be compared with our kernels on the GPU.
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU"
    return ""


def _jitted(function: Callable[..., Any], arguments: tuple[Any, ...], num_differentiated: int) -> Any:
    """Returns both calls of a JAX function with one result."""
    first, rest = arguments[:num_differentiated], arguments[num_differentiated:]

    @jax.jit
    def both(first, rest):
        result, pull_back = jax.vjp(lambda *first: function(*first, *rest), *first)
        # The gradients of the sum of the results, as in `Case.with_gradients`.
        return result, pull_back(jnp.ones_like(result))

    return functools.partial(jax.jit(function), *arguments), functools.partial(both, first, rest)


def _jax_attention(library: Any, q_BTNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    """Attention of `jax.nn`. The catalog's arguments have one document per row, so no segments are needed."""
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=library)
    return _jitted(attend, (q_BTNH, k_BSKH, v_BSKH), 3)


def _tokamax_attention(q_BTNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    import tokamax  # pyright: ignore[reportMissingImports]

    attend = functools.partial(tokamax.dot_product_attention, is_causal=True)
    return _jitted(attend, (q_BTNH, k_BSKH, v_BSKH), 3)


def _tokamax_grouped(rows_PD, weights_EDF, group_sizes_E) -> tuple[Call, Call | None]:
    import tokamax  # pyright: ignore[reportMissingImports]

    return _jitted(tokamax.ragged_dot, (rows_PD, weights_EDF, group_sizes_E), 2)


class TorchResult:
    """Tensors that are converted to arrays only when they are compared, not while they are timed."""

    def __init__(self, tensors: Any):
        self.tensors = tensors

    def block_until_ready(self) -> "TorchResult":
        """Waits for the GPU. `jax.block_until_ready` calls it, so that calls of both libraries are queued."""
        import torch

        if self.tensors[0].is_cuda:
            torch.cuda.synchronize()
        return self

    def arrays(self) -> list[jax.Array | None]:
        """Returns the arrays in the order of the kernel's results; None where torch returns none."""
        return [None if x is None else jnp.asarray(x.detach().float().cpu().numpy()) for x in self.tensors]


def _torch_calls(function: Callable[..., Any], tensors: list[Any], *, skipped: int = 0) -> tuple[Call, Call]:
    """Returns both calls of a torch function.

    Args:
      function: function of the tensors with one result.
      tensors: inputs with gradients.
      skipped: number of the kernel's results after the first that torch does not return.
    """
    import torch

    @torch.no_grad()
    def forward():
        return TorchResult([function(*tensors)])

    def both():
        result = function(*(x.requires_grad_() for x in tensors))
        # Not `backward`, which would add to the gradients of earlier calls.
        gradients = torch.autograd.grad(result, tensors, torch.ones_like(result))
        # None stands for results that torch does not return, so that the gradients keep their places.
        return TorchResult([result, *[None] * skipped, *gradients])

    return forward, both


def _to_torch(x: jax.Array) -> Any:
    import torch

    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    if jnp.issubdtype(x.dtype, jnp.integer):
        # Copied, because torch warns about the read-only arrays of JAX.
        return torch.from_numpy(np.array(x)).to(device)
    # torch does not know NumPy's bfloat16. Float32 holds each of its values exactly.
    return torch.from_numpy(np.array(x, np.float32)).to(device, getattr(torch, x.dtype.name))


def _torch_attention(q_BTNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    from torch.nn.functional import scaled_dot_product_attention

    def attend(*tensors):
        # torch's attention expects [B, N, T, H].
        heads_first = (x.transpose(1, 2) for x in tensors)
        # Without `enable_gqa` torch would need as many key heads as query heads.
        return scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

    return _torch_calls(attend, [_to_torch(x) for x in (q_BTNH, k_BSKH, v_BSKH)])


def _torch_decode(q_BNH, k_BSKH, v_BSKH, _) -> tuple[Call, Call | None]:
    """Decoding attention. All cache slots of the catalog's arguments are full, so no mask is needed."""
    from torch.nn.functional import scaled_dot_product_attention

    def attend(q, k, v):
        # torch's attention expects [B, N, T, H]; the single query gets a time axis of length 1.
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]

    # Without gradients, which decoding does not need and our kernel does not have.
    return _torch_calls(attend, [_to_torch(x) for x in (q_BNH, k_BSKH, v_BSKH)])[0], None


def _torch_grouped(rows_PD, weights_EDF, group_sizes_E) -> tuple[Call, Call | None]:
    """Grouped product. The catalog's groups fill all rows; torch leaves further rows undefined."""
    import torch

    # torch takes the end of each group instead of its size.
    offsets = _to_torch(jnp.cumsum(group_sizes_E, dtype=jnp.int32))

    def multiply(rows, weights):
        return torch.nn.functional.grouped_mm(rows, weights, offs=offsets)

    return _torch_calls(multiply, [_to_torch(rows_PD), _to_torch(weights_EDF)])


def _torch_cross_entropy(hidden_PD, table_VD, targets_P, _) -> tuple[Call, Call | None]:
    """Chunked linear cross entropy with gradients in the forward pass, as in Liger. All rows have the same
    weight.
    """
    import torch

    # torch's losses accept class numbers of 64 bits only.
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


_torch_attends = functools.partial(_torch_absent, "scaled_dot_product_attention")
_tokamax_absent = functools.partial(_missing, "tokamax")
OTHERS: dict[str, tuple[tuple[str, Callable[[], str], Callable[..., tuple[Call, Call | None]]], ...]] = {
    "flash_attention": (
        ("cuDNN (jax.nn)", lambda: _not_on("cuda"), functools.partial(_jax_attention, "cudnn")),
        ("jax.nn", lambda: "", functools.partial(_jax_attention, "xla")),
        ("torch SDPA", _torch_attends, _torch_attention),
        ("tokamax", _tokamax_absent, _tokamax_attention),
    ),
    "decode_attention": (("torch SDPA", _torch_attends, _torch_decode),),
    "grouped_matmul": (
        ("torch grouped_mm", lambda: _torch_absent("grouped_mm"), _torch_grouped),
        ("tokamax", _tokamax_absent, _tokamax_grouped),
    ),
    "cross_entropy": (
        ("torch fused linear", lambda: _torch_absent("linear_cross_entropy"), _torch_cross_entropy),
        ("Liger", lambda: _missing("liger_kernel") or _not_on("cuda", "rocm"), _liger),
    ),
}
"""Name, function that says why it cannot run here, and calls of each implementation, by operation. No library
that we know has the other operations in fused form."""
