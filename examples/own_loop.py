"""Speculation control in a decode loop of one's own: a model, a cache, and a `Controller`.

    python examples/own_loop.py

Everything about decoding is the loop's: the model is run by transformers, drafts are looked up in the
text so far. At every step the controller is shown a view, answers with a plan, and is told what came of it.
"""

from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from sdcontrol import BatchView, Controller, Hint, Observation, RequestView, Timing
from sdcontrol.engine.bundled import bundled_path, held_out_prompts, load_bundled_tokenizer


def look_up(tokens: list[int], width: int = 3, most: int = 8) -> list[int]:
    """What came after the last `width` tokens, where they stood before."""
    for start in range(len(tokens) - width - 1, -1, -1):
        if tokens[start : start + width] == tokens[-width:]:
            return tokens[start + width : start + width + most]
    return []


@torch.no_grad()
def verify(
    model: PreTrainedModel, cache: DynamicCache, tokens: list[int], draft: list[int]
) -> list[int]:
    """What comes after `tokens`: as much of `draft` as the model would write too, and one token more."""
    fed = tokens[cache.get_seq_length() :] + draft
    logits = model(torch.tensor([fed]), None, None, cache).logits  # mask, positions: its own
    best = logits[0, -1 - len(draft) :].argmax(dim=-1).tolist()
    accepted = next((i for i, token in enumerate(draft) if token != best[i]), len(draft))
    if accepted < len(draft):
        cache.crop(accepted - len(draft))
    return best[: accepted + 1]


def decode(
    model: PreTrainedModel, prompt: list[int], num_tokens: int, controller: Controller
) -> list[int]:
    """The greedy continuation of `prompt`; speculation changes how fast it comes, nothing else."""
    tokens, cache, written, step = list(prompt), DynamicCache(), 0, 0
    while written < num_tokens:
        found, started = look_up(tokens), perf_counter()
        hints = {"ngram": Hint(max_draft_tokens=len(found))}
        left, uncached = num_tokens - written, len(tokens) - cache.get_seq_length()
        request = RequestView("mine", len(tokens), written, left, 0.0, ("ngram",), hints)
        view = BatchView(step, (request,), 1024, prefill_tokens=uncached - 1)

        plan = controller.plan(view)
        draft, planned = found[: plan.choices[0].num_draft_tokens], perf_counter()
        new = verify(model, cache, tokens, draft)

        observation = Observation(
            view,
            plan,
            drafted=(len(draft),),
            proposed=(len(draft),),
            accepted=(len(new) - 1,),
            emitted=(len(new),),
            timing=Timing({}, perf_counter() - planned, planned - started),
            faults=controller.take_faults(),
        )
        controller.observe(observation)
        tokens, written, step = tokens + new, written + len(new), step + 1
    return tokens[len(prompt) :]


def main() -> None:
    """Continue a few prompts of the kind that repeats itself, without and with speculation."""
    model = AutoModelForCausalLM.from_pretrained(bundled_path("target"), dtype=torch.float32).eval()
    tokenizer = load_bundled_tokenizer()
    prompts = [tokenizer(text).input_ids for text in held_out_prompts("edit", 4)]
    for policy in ("off", "goodput"):
        controller, started = Controller(policy), perf_counter()
        written = sum(len(decode(model, prompt, 96, controller)) for prompt in prompts)
        print(f"{policy}: {written / (perf_counter() - started):.0f} tokens/s")


if __name__ == "__main__":
    main()
