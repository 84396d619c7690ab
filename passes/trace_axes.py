from __future__ import annotations
from dataclasses import dataclass, field
from gramfx.axes import Value
@dataclass(frozen=True)
class CouplingEdge:
    node: object; operand: object; reason: str
@dataclass
class Coupling:
    edges: list = field(default_factory=list)
    coupled: set = field(default_factory=set)
    @property
    def first(self): return self.edges[0] if self.edges else None
def trace_axes(graph_module, batch_dims, batch_size, trainable, objectives=None):
    import torch
    c = Coupling()
    for n in graph_module.graph.nodes:
        v = n.meta.get("val")
        mk = lambda t: Value(tuple(t.shape), True, None) if isinstance(t, torch.Tensor) else None
        n.meta["axes"] = tuple(mk(t) for t in v) if isinstance(v,(tuple,list)) else mk(v)
        c.coupled.add(n)
    return c
