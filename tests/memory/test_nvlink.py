# SPDX-License-Identifier: Apache-2.0
"""The links are asked of NVML, and whatever it does not say is no NVLink."""

import ctypes

import pytest

from stretto.memory import copy_engine

GPUS = ["aaa", "bbb", "ccc"]


class FakeNVML:
    """Answers as nvml.h says; `linked`: the pairs with NVLink, by the end of their UUIDs."""

    def __init__(self, linked, known=GPUS, starts=0):
        self.linked, self.known, self.starts = linked, [f"GPU-{gpu}" for gpu in known], starts
        self.is_open = False

    def nvmlInit_v2(self):
        self.is_open = self.starts == 0
        return self.starts

    def nvmlShutdown(self):
        self.is_open = False
        return 0

    def nvmlDeviceGetHandleByUUID(self, name, handle):
        assert self.is_open
        if name.decode() not in self.known:
            return 6  # NVML_ERROR_NOT_FOUND
        handle._obj.value = 1000 + self.known.index(name.decode())
        return 0

    def nvmlDeviceGetP2PStatus(self, first, second, index, status):
        assert self.is_open
        assert index == 2  # NVML_P2P_CAPS_INDEX_NVLINK
        pair = {GPUS[handle.value - 1000] for handle in (first, second)}
        status._obj.value = 0 if pair in self.linked else 5  # NVML_P2P_STATUS_OK, _NOT_SUPPORTED
        return 0


@pytest.fixture
def nvml(monkeypatch):
    def use(*args, **kwargs):
        fake = FakeNVML(*args, **kwargs)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)
        return fake

    return use


def test_gpus_are_linked_where_every_pair_is(nvml):
    fake = nvml([{"aaa", "bbb"}, {"aaa", "ccc"}])
    assert copy_engine.are_linked("aaa", GPUS)
    assert copy_engine.are_linked("bbb", ["aaa", "bbb"])
    assert not copy_engine.are_linked("bbb", GPUS)  # bbb and ccc are bridged to aaa alone
    assert not fake.is_open


@pytest.mark.parametrize("options", [{"known": ["aaa"]}, {"starts": 9}])
def test_links_unknown_to_nvml_are_not_nvlink(nvml, options):
    nvml([{"aaa", "bbb"}], **options)
    assert not copy_engine.are_linked("aaa", ["aaa", "bbb"])
    assert copy_engine.are_linked("aaa", ["aaa"])


def test_without_nvml_there_is_no_nvlink(monkeypatch):
    def absent(name):
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert not copy_engine.are_linked("aaa", GPUS)
