"""A captured graph replayed as plain kernel launches, one driver call a kernel.

A graph costs the device a fixed time at its start and end, which a step of many small graphs pays
at every boundary. The same kernels launched into the stream do not, and each may start while the
one before it ends, across boundaries too. Arguments, sizes and attributes are those that capture
recorded, so a replay runs no Python of the kernels' own. Only for graphs that are a chain of
kernels.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_void_p

import torch

_KERNEL = 0
_COPIED = (2, 4, 5, 11)  # attribute ids: cooperative, cluster, its scheduling, preferred cluster
_DEPENDENT_LAUNCH = 6
_PROGRAMMATIC = 1  # type of an edge


class _Attribute(Structure):
    _fields_ = (("id", c_int), ("pad", c_int), ("value", c_uint * 16))


class _Config(Structure):
    _fields_ = (
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    )


class _Node(Structure):
    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("arguments", c_void_p),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


class _Edge(Structure):
    _fields_ = (
        ("from_port", c_ubyte),
        ("to_port", c_ubyte),
        ("type", c_ubyte),
        ("reserved", c_char * 5),
    )


class Launches:
    """The kernels of one graph, which was captured with `keep_graph=True` and lives as long."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph  # owns the arguments
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._launch = self._driver.cuLaunchKernelEx
        self._launch.argtypes = (c_void_p, c_void_p, c_void_p, c_void_p)
        self._kept: list[object] = []
        self._configs: list[_Config] = []
        self._calls: list[tuple[c_void_p, ...]] = []
        self._stream = -1
        handle = c_void_p(graph.raw_cuda_graph())
        for node, is_dependent in self._chain(handle):
            self._add(node, is_dependent)

    def replay(self) -> None:
        """Launches everything on the current stream."""
        stream = torch.cuda.current_stream().cuda_stream
        if stream != self._stream:
            self._stream = stream
            for config in self._configs:
                config.stream = stream
        launch = self._launch
        for call in self._calls:
            error = launch(*call)
            if error:
                raise RuntimeError(f"the CUDA driver refused a kernel launch (error {error})")

    def _call(self, name: str, *arguments: object) -> None:
        error = getattr(self._driver, name)(*arguments)
        if error:
            raise RuntimeError(f"{name} failed (error {error})")

    def _chain(self, handle: c_void_p) -> list[tuple[int, bool]]:
        """Nodes in order, and whether each may start before its predecessor has ended."""
        count = c_size_t(0)
        self._call("cuGraphGetNodes", handle, None, byref(count))
        nodes = (c_void_p * count.value)()
        self._call("cuGraphGetNodes", handle, nodes, byref(count))
        edge_count = c_size_t(0)
        self._call("cuGraphGetEdges_v2", handle, None, None, None, byref(edge_count))
        sources, targets = ((c_void_p * edge_count.value)() for _ in range(2))
        edges = (_Edge * edge_count.value)()
        if edge_count.value:
            self._call("cuGraphGetEdges_v2", handle, sources, targets, edges, byref(edge_count))
        after = {s: (t, e.type) for s, t, e in zip(sources, targets, edges, strict=True)}
        heads = set(nodes) - set(targets)
        assert len(heads) == 1 and len(after) == len(nodes) - 1, "the graph is not a chain"
        node = heads.pop()
        chain = [(node, False)]
        while node in after:
            node, kind = after[node]
            chain.append((node, kind == _PROGRAMMATIC))
        return chain

    def _add(self, node: int, is_dependent: bool) -> None:
        kind = c_int(-1)
        self._call("cuGraphNodeGetType", c_void_p(node), byref(kind))
        assert kind.value == _KERNEL, f"a graph node of type {kind.value} is no kernel"
        found = _Node()
        self._call("cuGraphKernelNodeGetParams_v2", c_void_p(node), byref(found))
        attributes = []
        for name in _COPIED:
            attribute = _Attribute(name)
            value = byref(attribute, _Attribute.value.offset)
            error = self._driver.cuGraphKernelNodeGetAttribute(c_void_p(node), name, value)
            if not error and attribute.value[0]:
                attributes.append(attribute)
        if is_dependent:
            attribute = _Attribute(_DEPENDENT_LAUNCH)
            attribute.value[0] = 1
            attributes.append(attribute)
        array = (_Attribute * max(1, len(attributes)))(*attributes)
        config = _Config(found.grid, found.block, found.shared_bytes, None, array, len(attributes))
        self._kept.append(array)
        self._configs.append(config)
        function = c_void_p(found.function or found.kernel)
        place = c_void_p(ctypes.addressof(config))
        arguments = (c_void_p(found.arguments), c_void_p(found.extra))
        self._calls.append((place, function, *arguments))
