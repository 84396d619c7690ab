"""Control flow, coupling by the objective, wrappers, mixed precision and layouts."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases.base import Case, Columns, used, zero
from tests.cases.losses import classes, entropy

PARTNERS = torch.tensor([1, 0, 3, 2])


class Experts(nn.Module):
    """Two of four experts for each token, in a loop over the experts that were chosen; the last never is."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.rise, self.fall = nn.Parameter(torch.randn(4, 6, 4)), nn.Parameter(torch.randn(4, 4, 3))
        self.router.bias.data[3] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        share = share / share.sum(-1, keepdim=True)
        result = torch.zeros_like(tokens)
        for expert in chosen.unique().tolist():
            token, rank = (chosen == expert).nonzero(as_tuple=True)
            gate, value = F.linear(tokens[token], self.rise[expert]).chunk(2, -1)
            answer = F.linear(F.silu(gate) * value, self.fall[expert])
            result.index_add_(0, token, answer * share[token, rank].unsqueeze(1))
        return result.view_as(x)


def check_experts(rows: Tensor, cols: Columns) -> None:
    """The expert that nobody chose has zero columns."""
    zero(cols("rise").view(3, 4, -1)[:, 3])
    zero(cols("fall").view(3, 4, -1)[:, 3])
    used(cols("router"))


class CompiledBody(nn.Module):
    """A body that is compiled already."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.LayerNorm(5))
        self.body, self.head = torch.compile(body, backend="aot_eager"), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Autocast(nn.Module):
    """Float32 parameters, bfloat16 products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return self.second(self.norm(self.first(x).relu()))


def contrast(z: Tensor) -> Tensor:
    """Objectives [B]: InfoNCE against the whole batch."""
    z = F.normalize(z, dim=1)
    others = (2.0 * z @ z.t()).masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -torch.inf)
    return F.cross_entropy(others, PARTNERS.to(z.device), reduction="none")


class RaggedSum(nn.Module):
    """Sums each sample's own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, rows: Tensor) -> Tensor:
        padded = torch.nested.to_padded_tensor(self.first(rows).tanh(), 0.0)
        return self.second(padded.sum(1))[:, 0]


def ragged() -> tuple[Tensor]:
    """Samples of two, five and one row."""
    return (torch.nested.nested_tensor([torch.randn(n, 3) for n in (2, 5, 1)], layout=torch.jagged),)


def wrapped() -> nn.Module:
    """A network inside DistributedDataParallel, one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))


UNUSUAL = [
    Case(
        name="c23_mixture_of_experts",
        situation="Routing is constant for the derivative; tokens of one sample scatter over experts, by the data.",
        build=Experts,
        inputs=lambda: (torch.randn(3, 4, 4),),
        objective=lambda output: output.square().mean((1, 2)),
        batch_size=3,
        unproven=True,
        deferred=True,
        claims=check_experts,
    ),
    Case(
        name="c28_compiled_submodule",
        situation="A submodule is already wrapped by torch.compile: the same Jacobian as without.",
        build=CompiledBody,
        inputs=lambda: (torch.randn(4, 3),),
        objective=entropy,
        targets=classes(0, 1, 1, 0),
        context=lambda: torch._functorch.config.patch(donated_buffer=False),
        deferred=True,
    ),
    Case(
        name="c29_autocast",
        situation="Float32 parameters under bfloat16 autocast: the Gramian is float32, agreement as bfloat16 allows.",
        build=Autocast,
        inputs=lambda: (torch.randn(4, 6),),
        objective=lambda output, targets: entropy(output.float(), targets),
        targets=classes(0, 2, 1, 1),
        differentiable=False,
        tol=3e-2,
        dtypes=(torch.float32,),
    ),
    Case(
        name="x08_contrastive_objective",
        situation="An independent encoder whose losses each see the whole batch: cotangents are dense in the batch.",
        build=lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)),
        inputs=lambda: (torch.randn(4, 3),),
        objective=contrast,
        coupled=True,
        alone=False,
        deferred=True,
    ),
    Case(
        name="x10_jagged_rows",
        situation="A jagged nested tensor: the Gramian of the padded batch.",
        build=RaggedSum,
        inputs=ragged,
        batch_size=3,
        alone=False,
    ),
    Case(
        name="x13_wrapped_in_ddp",
        situation="A module inside DistributedDataParallel: this rank's Gramian is that of the module without it.",
        build=wrapped,
        inputs=lambda: (torch.randn(4, 4),),
        objective=entropy,
        targets=classes(0, 1, 1, 0),
    ),
]
