"""Losses of preferences in float64: the formulas of TRL 1.16, and its own code where it is installed.

Formulas are from `trl/trainer/dpo_trainer.py` (`_compute_loss`), `trl/trainer/kto_trainer.py`
(`_compute_loss`) and `trl/experimental/orpo/orpo_trainer.py` (`odds_ratio_loss`, `get_batch_loss_metrics`).
"""

import collections
import types

import torch
from torch.nn import functional


def losses(config, policy_N2, reference_N2, num_tokens_N2, labels_N=None):
    """Returns the loss of each pair; of labeled answers, the second side is that of the divergence."""
    ratios_N2 = policy_N2 - reference_N2
    beta, smoothing = config.beta, config.label_smoothing
    if config.loss_type == "kto":
        kl = ratios_N2[:, 1].mean().detach().clamp(min=0)
        good_N = config.desirable_weight * (1 - functional.sigmoid(beta * (ratios_N2[:, 0] - kl)))
        bad_N = config.undesirable_weight * (1 - functional.sigmoid(beta * (kl - ratios_N2[:, 0])))
        return torch.where(labels_N > 0, good_N, bad_N)
    if config.loss_type == "orpo":
        means_N2 = policy_N2 / num_tokens_N2
        log_odds_N = (means_N2[:, 0] - means_N2[:, 1]) - (
            torch.log1p(-torch.exp(means_N2[:, 0])) - torch.log1p(-torch.exp(means_N2[:, 1]))
        )
        return -beta * functional.logsigmoid(log_odds_N)
    if config.loss_type == "ipo":
        means_N2 = ratios_N2 / num_tokens_N2
        return (means_N2[:, 0] - means_N2[:, 1] - 1 / (2 * beta)) ** 2
    logits_N = beta * (ratios_N2[:, 0] - ratios_N2[:, 1])
    clean_N, flipped_N = -functional.logsigmoid(logits_N), -functional.logsigmoid(-logits_N)
    if config.loss_type == "robust":
        return ((1 - smoothing) * clean_N - smoothing * flipped_N) / (1 - 2 * smoothing)
    return (1 - smoothing) * clean_N + smoothing * flipped_N


def loss_by_trl(config, policy_N2, reference_N2, num_tokens_N2, labels_N=None):
    """Returns the mean loss and the metrics of TRL's own trainers; `orpo` without the next tokens."""
    if config.loss_type == "kto":
        return _kto(config, policy_N2, reference_N2, labels_N)
    if config.loss_type == "orpo":
        return _orpo(config, policy_N2 / num_tokens_N2)
    return _dpo(config, policy_N2, reference_N2, num_tokens_N2)


class _Accelerator:
    device = "cpu"

    @staticmethod
    def gather(values):
        return values

    gather_for_metrics = gather


def _trainer(config, **fields):
    """Returns what a trainer's loss reads of the trainer."""
    return types.SimpleNamespace(
        accelerator=_Accelerator, beta=config.beta, aux_loss_enabled=False, precompute_ref_logps=True,
        model=types.SimpleNamespace(training=True), _total_train_tokens=0, _tp_size=1,
        _metrics={"train": collections.defaultdict(list)}, **fields,
    )  # fmt: skip


def _model(log_probs):
    """Returns a model whose targets have these log-probabilities, one token with all of an answer's."""
    zeros = torch.zeros_like(log_probs).detach()
    outputs = types.SimpleNamespace(
        log_probs=log_probs, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), loss=zeros
    )
    return lambda **_: outputs


def _inputs(lengths_N):
    """Returns tokens and masks of answers with these numbers of tokens, after a prompt of one token."""
    longest = int(lengths_N.max())
    mask = torch.arange(longest + 1)[None] - 1
    mask = ((mask >= 0) & (mask < lengths_N[:, None])).long()
    return {"input_ids": torch.ones_like(mask), "attention_mask": mask, "completion_mask": mask}


def _spread(sums_N, lengths_N):
    """Returns log-probabilities of tokens with these sums; the gradient of the first is that of the sum."""
    first = torch.nn.functional.one_hot(torch.zeros(len(sums_N), dtype=torch.long), int(lengths_N.max()))
    return sums_N[:, None] * first


def _dpo(config, policy_N2, reference_N2, num_tokens_N2):
    from trl.trainer.dpo_trainer import DPOTrainer

    trainer = _trainer(
        config, ld_alpha=None, f_divergence_type="reverse_kl", loss_types=[config.loss_type],
        loss_weights=[1.0], label_smoothing=config.label_smoothing, use_weighting=False,
    )  # fmt: skip
    lengths_N = num_tokens_N2.T.reshape(-1).long()
    inputs = _inputs(lengths_N) | {
        "ref_chosen_logps": reference_N2[:, 0], "ref_rejected_logps": reference_N2[:, 1]
    }  # fmt: skip
    model = _model(_spread(policy_N2.T.reshape(-1), lengths_N))
    return DPOTrainer._compute_loss(trainer, model, inputs, False), trainer._metrics["train"]


def _kto(config, policy_N2, reference_N2, labels_N):
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = _trainer(
        config, calculate_KL=True, loss_type="kto", desirable_weight=config.desirable_weight,
        undesirable_weight=config.undesirable_weight, _compute_kl_logps=lambda *_: policy_N2[:, 1],
    )  # fmt: skip
    lengths_N = torch.ones(len(policy_N2), dtype=torch.long)
    inputs = _inputs(lengths_N) | {
        "label": labels_N > 0, "ref_logps": reference_N2[:, 0], "ref_KL_logps": reference_N2[:, 1]
    }  # fmt: skip
    model = _model(_spread(policy_N2[:, 0], lengths_N))
    return KTOTrainer._compute_loss(trainer, model, inputs, False), trainer._metrics["train"]


def _orpo(config, means_N2):
    from trl.experimental.orpo.orpo_trainer import ORPOTrainer

    # It rounds to float32 (`.float()`), so that this alone is compared with a wider tolerance.
    results = ORPOTrainer.odds_ratio_loss(_trainer(config), means_N2[:, 0], means_N2[:, 1])
    return -results[0].mean(), {
        "log_odds_ratio": [float(results[3].detach())],
        "log_odds_chosen": [float(results[4].detach())],
    }
