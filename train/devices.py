"""How many devices a program trains on, chosen before JAX starts."""

import jax


def use_cpu_devices(count: int) -> None:
    """Has JAX show the CPU as `count` devices; without effect once JAX has started.

    Two devices use two cores better than one: many operations run on one core of a device.
    """
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        pass  # JAX runs already, on as many devices as it has
