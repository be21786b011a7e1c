# SPDX-License-Identifier: Apache-2.0
"""The doctor on a machine with a GPU: no fault, and facts that agree with CuPy and the driver."""

import json
from dataclasses import replace

import pytest

from kda_cupy.doctor import diagnose, run_small_kernel
from kda_cupy.environment import Unavailable, collect, probe


def test_no_fault_here_and_the_kernel_ran():
    findings = diagnose()
    assert [finding for finding in findings if finding.status == "fault"] == []
    assert findings[-1].detail == "a small one compiles, runs and is right"


def test_gpus_agree_with_cupy():
    import cupy

    found = probe()
    assert found.driver_gpus == cupy.cuda.runtime.getDeviceCount() == len(found.gpus)
    for gpu in found.gpus:
        device = cupy.cuda.Device(gpu.index)
        assert gpu.compute_capability.replace(".", "") == device.compute_capability
        assert gpu.multiprocessors == device.attributes["MultiProcessorCount"]
        assert gpu.l2_bytes == device.attributes["L2CacheSize"] > 0
        assert 0 < gpu.free_bytes <= gpu.memory_bytes == device.mem_info[1]
    version = cupy.cuda.runtime.driverGetVersion()
    assert found.driver == f"{version // 1000}.{version % 1000 // 10}"


def test_only_the_chosen_gpu_is_looked_at():
    collected = json.loads(json.dumps(collect(devices=[0])))
    assert [gpu["index"] for gpu in collected["gpus"]] == [0]


def test_clocks_come_from_nvidia_ml_py():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    found = probe()
    assert not isinstance(found.driver_release, Unavailable)
    for gpu in found.gpus:
        assert 0 < gpu.clocks_mhz["multiprocessors"] <= gpu.clocks_mhz["multiprocessors_max"]
        assert 0 < gpu.clocks_mhz["memory"] <= gpu.clocks_mhz["memory_max"]


def test_small_kernel_really_runs_on_the_gpu_it_is_given():
    run_small_kernel(0)
    with pytest.raises(Exception, match="invalid device ordinal"):
        run_small_kernel(1000)


def test_kernel_that_fails_is_a_fault():
    found = probe()
    wrong = replace(found, gpus=[replace(found.gpus[0], index=1000)])
    kernel = diagnose(wrong)[-1]
    assert kernel.status == "fault"
    assert kernel.detail.startswith("GPU 1000: ")
