"""Buffers that are used again: never under an array that is still in use."""

import gc

import jax
import numpy as np

from dejax.buffers import BufferPool


def test_a_buffer_is_used_again_once_nobody_refers_to_it():
    pool = BufferPool()
    first = pool.take((4, 8), np.float32)
    place = first.ctypes.data
    assert place % 64 == 0 and first.flags.writeable
    view = first.reshape(-1)[3:].view(np.uint8)
    del first
    gc.collect()
    second = pool.take((32,), np.float32)
    assert pool.made == 2 and second.ctypes.data != place  # a view of a view still lies there
    del view
    gc.collect()
    assert pool.take((32,), np.int32).ctypes.data == place and pool.made == 2


def test_a_buffer_under_a_jax_array_is_not_used_again():
    pool = BufferPool()
    staged = pool.take((64, 64), np.float32)
    staged[:] = 1
    array = jax.device_put(staged).block_until_ready()
    assert array.unsafe_buffer_pointer() == staged.ctypes.data  # the copy that is saved
    del staged
    gc.collect()
    for _ in range(3):
        pool.take((64, 64), np.float32)[:] = 2
    np.testing.assert_array_equal(jax.device_get(array), 1)
    del array
    gc.collect()
    assert pool.take((64, 64), np.float32) is not None and pool.made == 2


def test_a_buffer_that_a_computation_reads_is_not_used_again():
    """The array is gone before what was computed from it is."""
    pool = BufferPool()
    slow = jax.jit(lambda x, y: sum((x @ y) * 0 for _ in range(8)) + y)
    big = jax.device_put(np.ones((512, 512), np.float32))
    for value in range(10):
        staged = pool.take((512, 512), np.float32)
        staged[:] = value
        array = jax.device_put(staged)
        result = slow(big, array)
        del staged, array
        pool.take((512, 512), np.float32)[:] = -1
        np.testing.assert_array_equal(jax.device_get(result), value)
