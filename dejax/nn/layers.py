"""Linear map, RMS norm and SwiGLU, with weights in the checkpoint's own layout [out, in].

Weights may be held in a shorter dtype than the activations; they are widened where they are used,
so that arithmetic is in the activations' dtype (float32 or float64).
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


def project(
    x: Float[Array, "*rows in_dim"], weight: Float[Array, "out_dim in_dim"]
) -> Float[Array, "*rows out_dim"]:
    """x W^T. One row is W x: on CPU, what made the row is else computed anew for every output."""
    if x.ndim == 2 and x.shape[0] == 1:
        return (weight @ x[0])[None]
    return x @ weight.T


class Linear(nnx.Module):
    """y = x W^T (+ b). `weight`: [out, in]; `bias`: [out] or None."""

    def __init__(
        self, in_dim: int, out_dim: int, *, bias: bool = False, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        init = jax.random.normal(rngs.params(), (out_dim, in_dim), dtype)
        self.weight = nnx.Param(init * jnp.asarray(in_dim**-0.5, dtype))
        self.bias = nnx.Param(jnp.zeros((out_dim,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*rows in_dim"]) -> Float[Array, "*rows out_dim"]:
        y = project(x, self.weight[...].astype(x.dtype))
        return y if self.bias is None else y + self.bias[...].astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm, computed in at least float32, then scaled by `weight` [dim]."""

    def __init__(self, dim: int, *, eps: float, dtype=jnp.float32):
        self.weight = nnx.Param(jnp.ones((dim,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normed = (wide * jax.lax.rsqrt(mean_square + self.eps)).astype(x.dtype)
        return normed * self.weight[...].astype(x.dtype)


class SwiGLU(nnx.Module):
    """down(silu(gate(x)) * up(x)): the dense feed-forward and the shared experts."""

    def __init__(
        self, dim: int, width: int, *, bias: bool = False, dtype=jnp.float32, rngs: nnx.Rngs
    ):
        self.gate_proj = Linear(dim, width, bias=bias, dtype=dtype, rngs=rngs)
        self.up_proj = Linear(dim, width, bias=bias, dtype=dtype, rngs=rngs)
        self.down_proj = Linear(width, dim, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "*rows dim"]) -> Float[Array, "*rows dim"]:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
