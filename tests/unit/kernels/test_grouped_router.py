"""The sigmoid router against transformers' own, and its rows alone."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from kernels.experts import route_grouped

modeling = pytest.importorskip("transformers.models.glm4_moe_lite.modeling_glm4_moe_lite")

ROWS, EXPERTS, K = 70, 24, 5


@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2), (8, 3), (4, 4)])
@pytest.mark.parametrize("renormalise", [True, False])
def test_choices_and_weights_of_transformers(groups: int, best: int, renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(groups)
    router = modeling.Glm4MoeLiteTopkRouter(
        SimpleNamespace(
            num_experts_per_tok=K,
            num_local_experts=EXPERTS,
            hidden_size=16,
            routed_scaling_factor=1.8,
            n_group=groups,
            topk_group=best,
            norm_topk_prob=renormalise,
        )
    )
    x = torch.randn(ROWS, 16, generator=generator)
    router.weight.data.normal_(generator=generator)
    router.e_score_correction_bias.normal_(std=0.3, generator=generator)
    with torch.no_grad():
        logits, weights, ids = router(x)
    routes = route_grouped(
        logits,
        router.e_score_correction_bias,
        K,
        groups=groups,
        best_groups=best,
        renormalise=renormalise,
        factor=1.8,
    )
    by_id = torch.zeros(ROWS, EXPERTS).scatter(1, routes.ids.long(), routes.weights)
    torch.testing.assert_close(by_id, torch.zeros(ROWS, EXPERTS).scatter(1, ids, weights))


def test_c1_a_rows_choice_is_its_own_and_ties_go_to_the_smallest_id() -> None:
    logits = torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(1)).round()
    bias = torch.zeros(EXPERTS)
    whole = route_grouped(logits, bias, K, groups=4, best_groups=2, factor=2.5)
    for row in range(ROWS):
        alone = route_grouped(logits[row : row + 1].clone(), bias, K, groups=4, best_groups=2, factor=2.5)
        assert torch.equal(alone.ids[0], whole.ids[row])
        assert torch.equal(alone.weights[0], whole.weights[row])
        chosen = logits[row, whole.ids[row].long()]
        steps = list(zip(chosen.tolist(), whole.ids[row].tolist(), strict=True))
        assert all(one[0] > two[0] or one[1] < two[1] for one, two in itertools.pairwise(steps))
