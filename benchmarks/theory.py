"""Theorem 4.1's grid as one batched computation against a loop over its points.

    python -m benchmarks.theory [--points N] [--out JSON]

Both use the same batches, drawn beforehand, in float64. For each point a loop calls the closed-form gradient or
autograd over all batches at once, so it is vectorised within a point. It is measured on every 20th point. The ratio is
to the faster of the two loops. Rates are per second of processor time of one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks import record
from benchmarks.record import Line, Measured
from data_pipeline.core.errors import run_command
from trainer.theory.linear_contrastive.model import (
    angular_speed_at_a_point,
    angular_speeds,
    contrastive_loss,
    draw_pairs,
    feature_states,
    views_of,
)

NUM_PAIRS, STRIDE = 32, 20
CPU = torch.device("cpu")
REST = feature_states([45], [0.6], [0.7])


def states(num_points: int) -> tuple[Tensor, Tensor]:
    """Return angles of the feature and correlations of the other, sqrt(`num_points`) of each."""
    num = math.ceil(math.sqrt(num_points))
    weak = feature_states(torch.linspace(5, 85, num).tolist(), [0.4], [0.5])
    return weak, feature_states([15], [0.6], torch.linspace(0, 0.95, num).tolist())


def as_one(weak: Tensor, other: Tensor, pairs: Tensor) -> int:
    for first in range(0, len(pairs), 2):
        angular_speeds(weak, other, REST, pairs[first : first + 2])
    return len(weak) * len(other)


def as_a_loop(
    point: Callable[[Tensor, Tensor], object],
    weak: Tensor,
    other: Tensor,
    pairs: Tensor,
) -> int:
    numbers = range(0, len(weak) * len(other), STRIDE)
    for number in numbers:
        p, q = divmod(number, len(other))
        point(torch.cat([weak[p : p + 1], other[q : q + 1], REST]), pairs)
    return len(numbers)


def by_autograd(states_K3: Tensor, pairs: Tensor) -> object:
    angle_K, norm_K, alpha_K = states_K3.T
    rows = pairs.transpose(1, 2)
    x, v = rows, views_of(rows, rows.flip(-1), alpha_K)
    theta_K2 = norm_K[:, None] * torch.stack([angle_K.cos(), angle_K.sin()], dim=1)
    theta_RK2 = theta_K2.expand(len(x), -1, -1).clone().requires_grad_()
    return torch.autograd.grad(contrastive_loss(theta_RK2, x, v).sum(), theta_RK2)


def points_a_second(compute: Callable[[], int]) -> float:
    start = time.process_time()
    num = compute()
    return num / (time.process_time() - start)


def against_the_faster_loop(measured: Measured) -> float:
    return measured["ours"] / max(rate for name, rate in measured.items() if name != "ours")


def main() -> None:
    parser = record.benchmark_parser("Compare a grid of the linear model with a loop over its points.", rounds=5)
    parser.add_argument(
        "--points", type=int, default=1000, metavar="N", help="points of the grid, rounded up to a square"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 64], metavar="R", help="batches at each point")
    args = parser.parse_args()
    before = record.on_one_core(packages=["torch"])
    weak, other = states(args.points)
    results = []
    for num_batches in args.batches:
        pairs = draw_pairs(0, 0, num_batches, num_pairs=NUM_PAIRS, num_features=2 + len(REST), device=CPU)
        computed: dict[str, Callable[[], int]] = {
            "ours": partial(as_one, weak, other, pairs),
            "a loop over points, closed form": partial(as_a_loop, angular_speed_at_a_point, weak, other, pairs),
            "a loop over points, autograd": partial(as_a_loop, by_autograd, weak, other, pairs),
        }
        for compute in computed.values():
            compute()
        peers = {name: partial(points_a_second, compute) for name, compute in computed.items()}
        title = f"{len(weak) * len(other)} points, {num_batches} batches of {NUM_PAIRS} pairs at each"
        line = Line(title, "points/s", peers, against_the_faster_loop, "ratio", 20.0)
        results.append(record.measure(line, num_rounds=args.rounds))
        print(record.table(results[-1]), flush=True)
    record.save(args.out, {**before, "lines": results})


if __name__ == "__main__":
    run_command(main)
