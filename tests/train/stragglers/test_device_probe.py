"""The probe of devices, here of a CPU, with small matrices."""

import jax

from zaya_jax.train.stragglers.device_probe import DeviceProbe


def test_the_probe_times_each_device_and_keeps_nothing():
    before = len(jax.live_arrays())
    probe = DeviceProbe(2 * jax.devices()[:1], width=64)
    for _ in range(2):
        seconds = probe.seconds()
        assert len(seconds) == 2
        assert all(0 < each < 60 for each in seconds)
    assert len(jax.live_arrays()) == before
