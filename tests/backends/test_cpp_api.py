"""The structs in `api.h` and `api.py` agree, and the structs keep alive what they point at."""

import ctypes
import gc
import re

import pytest
import torch
from torch import nn

import credibly as cr
from credibly.backends.cpp import api, api_wide
from credibly.backends.cpp.build import SOURCES
from credibly.backends.cpp.library import library
from credibly.backends.cpp.stack import Stack

STRUCTS = {
    name: kind
    for name, kind in {**vars(api), **vars(api_wide)}.items()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
}
# What a C++ type may be in Python. Pointers to ctypes arrays have their own types.
KINDS = {
    "int64_t": [api.Int],
    "uint64_t": [api.UInt],
    "double": [api.Real],
    "const int64_t*": [api.Ints, api.Address],
    "const double*": [api.Reals, api.Address],
    "const T* const*": [api.Addresses],
}


def declared() -> dict[str, list[tuple[str, str]]]:
    """(type, name) of every field of every struct in `api.h`."""
    text = re.sub(r"//.*", "", (SOURCES / "api.h").read_text())
    structs = re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL)
    return {name: re.findall(r"^\s*(.*?[ *])\s*(\w+);", body, re.MULTILINE) for name, body in structs}


def test_both_sides_declare_the_same_structs():
    assert list(declared()) == list(STRUCTS)


@pytest.mark.parametrize("name", STRUCTS)
def test_fields_agree(name):
    struct = STRUCTS[name]
    fields = declared()[name]
    assert [field for _, field in fields] == [field for field, _ in struct._fields_]
    for (cpp, field), (_, kind) in zip(fields, struct._fields_, strict=True):
        cpp = cpp.strip()
        nested = STRUCTS.get(re.sub(r"<.*>", "", cpp))
        default = [api.Address] if cpp.endswith("*") else [nested]
        assert kind in KINDS.get(cpp, default), f"{field}: {cpp} in C++"


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("name", STRUCTS)
def test_sizes_agree(name):
    assert library().struct_size(name.encode()) == ctypes.sizeof(STRUCTS[name])


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_every_function_is_exported_for_its_dtypes():
    for name in api.ARGUMENTS:
        for dtype in api.SUFFIX:
            assert api.function(name, dtype) is not None
    for name in api_wide.ARGUMENTS:
        assert api_wide.function(name) is not None
    assert library().struct_size(b"Unknown") == -1


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_functions_check_their_arguments():
    with pytest.raises(ctypes.ArgumentError):
        api.function("moments", torch.float32)(api_wide.Normals())


def test_nested_structs_keep_their_arrays_alive():
    net = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 2))
    x = torch.zeros(4, 3)
    given = cr.Problem(net, (x, x[:, :2]), cr.likelihoods.Gaussian(1.0), cr.priors.Normal(1.0))
    stack = Stack.of(given.layout.module, given.layout)
    assert stack is not None
    outputs = api.Outputs(network=stack.struct)
    outputs.network = api.Network(1, *((api.Int * 1)(n) for n in (5, 6, 7, 8, 9)), 10)
    gc.collect()
    [bytearray(8) for _ in range(1000)]
    network = outputs.network
    assert [network.inputs[0], network.outputs[0], network.weight[0], network.bias[0]] == [5, 6, 7, 8]
    assert list(stack.struct.inputs[:2]) == [3, 7]


def test_addresses_are_those_of_contiguous_tensors():
    tensor = torch.zeros(4, 3)
    assert api.address(tensor) == tensor.data_ptr()
    assert api.address(None) is None
    with pytest.raises(AssertionError):
        api.address(tensor.T)
