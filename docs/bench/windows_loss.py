"""The mean loss of windows of tokens, each scored alone, as `plimsoll eval` computes it."""

import torch


def loss(model, windows):
    total = count = 0
    with torch.no_grad():
        for window in windows:
            log_p = torch.log_softmax(model(window[None]).logits[0, :-1].double(), dim=-1)
            total -= log_p.gather(1, window[1:, None]).sum().item()
            count += len(window) - 1
    return total / count
