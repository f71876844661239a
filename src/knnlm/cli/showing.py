"""How figures are shown: those of tune and of eval."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knnlm.cli import screen

if TYPE_CHECKING:
    from knnlm.adaptation import Adaptation
    from knnlm.evaluation import Evaluation
    from knnlm.tuning import Tuning


def show_tuning(memory: Path, chosen_on: list[str], result: Tuning, *, json: bool) -> None:
    """Say what was chosen, and what it gives."""
    sweep = result.sweep
    best = sweep.best if sweep is not None else None
    facts: dict[str, Any] = {
        "memory": str(memory),
        "chosen_on": chosen_on,
        "tokens": result.tokens,
        "memories": [spec.as_dict() for spec in result.specs],
        "weights": result.weights.kind,
        "k": best[0] if best else None,
        "temperature": best[1] if best else None,
        "lambda": result.lambda_,
        "base_perplexity": result.base_perplexity,
        "perplexity": result.perplexity,
        "settings_tried": sum(int(found.perplexity.size) for found in result.sweeps if found is not None),
        "sweep_seconds": result.seconds,
        "at_edge": sweep.at_edge() if sweep is not None else [],
        "documents": result.documents,
        "remembered_documents": result.remembered,
    }
    if json:
        screen.print_json(facts)
        return
    rows = [("chosen on", f"{result.tokens:,} tokens of {', '.join(chosen_on)}")]
    for spec in result.specs:
        votes = f"k {spec.settings[0].k}, τ {spec.settings[0].temperature:g}" if spec.settings else ""
        others = f", and {len(spec.settings) - 1} other ways of counting" if len(spec.settings) > 1 else ""
        rows.append((spec.label, f"{votes}{others}"))
    rows += [
        ("weights", describe_weights(result)),
        ("perplexity", f"{result.base_perplexity:.3f} → {result.perplexity:.3f} on that text; report it on another"),
        ("time", f"{facts['settings_tried']:,} settings and the weights in {result.seconds:.1f} s"),
    ]
    if facts["at_edge"]:
        rows.append(("note", f"best value is the last one tried of: {', '.join(facts['at_edge'])}"))
    rows += warning(result.remembered, result.documents, "what was chosen on them suits no other text")
    screen.print_facts(rows)


def describe_weights(result: Tuning) -> str:
    """Say how parts are weighed."""
    return result.weights.kind if result.lambda_ is None else f"{result.weights.kind}, λ {result.lambda_:.3g}"


def show_evaluation(found: Evaluation, *, json: bool) -> None:
    """Say how well a text was predicted."""
    figures = found.as_dict()
    if json:
        screen.print_json(figures)
        return
    rows = [
        (
            "text",
            f"{figures['tokens']:,} tokens, {figures['words']:,} words of {screen.count(found.documents, 'document')}",
        ),
        (
            "perplexity",
            f"{figures['base_perplexity']:.3f} → {figures['perplexity']:.3f}  ({figures['gain']:.1%} lower)",
        ),
        ("  best of all", f"{figures['oracle_perplexity']:.3f}, choosing the best of model and memories at each token"),
        ("  per word", f"{figures['base_word_perplexity']:.2f} → {figures['word_perplexity']:.2f}"),
        ("bits per byte", f"{figures['base_bits_per_byte']:.4f} → {figures['bits_per_byte']:.4f}"),
        ("weights", f"{found.weights}, λ {found.lambda_:.3g}"),
    ]
    for memory in found.memories:
        votes = f"k {memory['k']}, τ {memory['temperature']:g}, {memory['metric']}, " if "k" in memory else ""
        rows.append((f"  {memory['name']}", f"{votes}weight {memory['weight']:.3g}"))
    rows += [
        ("time", f"{figures['seconds']:.1f} s, {figures['tokens_per_second']:,.0f} tokens/s"),
        *warning(found.remembered, found.documents, "their figures are too good"),
    ]
    screen.print_facts(rows)


def warning(remembered: int, documents: int, so: str) -> list[tuple[str, str]]:
    """Tell a person who measures on text that is in the memory."""
    if not remembered:
        return []
    return [("WARNING", f"{remembered:,} of {screen.count(documents, 'document')} are in the memory itself: {so}")]


def adaptation_rows(result: Adaptation) -> list[tuple[str, str]]:
    """Lay out what each part of an adapted memory is worth."""
    return [
        ("the model", perplexity(result.base)),
        ("the student alone", perplexity(result.fine_tuned)),
        ("the model and its memory", perplexity(result.knn)),
        ("the model and the student", f"{perplexity(result.decoder)}  (λ = {result.decoder_lambda:.2f})"),
        ("all, gated", perplexity(result.everything)),
    ]


def perplexity(value: float) -> str:
    """Write a perplexity; that of a student that has hardly learnt anything has many digits, none of which matters."""
    return f"{value:.3f}" if value < 1e6 else f"{value:.2g}"


def show_decoder(folder: Path, *, json: bool) -> None:
    """Say what a decoder is, how it was trained, and for which model it was tuned."""
    from knnlm.memory.decoder import load_card

    card = load_card(folder)
    if json:
        facts = asdict(card)
        screen.print_json(
            {
                "decoder": str(folder),
                "lambda": facts.pop("weight"),
                "lambda_facts": facts.pop("weight_facts"),
                **facts,
            }
        )
        return
    student, chosen = card.student, card.weight_facts
    blocks = "" if student["blocks"] is None else f", blocks {', '.join(map(str, student['blocks']))}"
    losses = ", ".join(f"{name} {value:.3f}" for name, value in card.losses.items() if value is not None)
    taught = "" if card.teacher is None else f", {card.beta:g} of the loss by the store {card.teacher}"
    tuned = "not yet: knnlm tune DECODER TEXT --model MODEL"
    if card.weight is not None:
        tuned = f"λ {card.weight:.3g}"
        if chosen is not None:
            gain = f"{chosen['base_perplexity']:.2f} → {chosen['perplexity']:.2f}"
            tuned += f" for {chosen['model']}; chosen on {chosen['tokens']:,} tokens of {', '.join(chosen['text'])} "
            tuned += f"(perplexity {gain})"
    rows = [
        ("decoder", f"{folder}"),
        ("student", f"{student['spec']} ({student['class']}, {student['parameters'] / 1e6:,.1f}M weights{blocks})"),
        ("tokens", f"{card.vocab_size:,}, tokenizer {card.tokenizer}"),
        ("trained", f"{card.tokens:,} tokens of text, {card.steps:,} steps, {card.seconds:,.0f} s{taught}"),
        ("", f"at the end: {losses}"),
        ("window", f"{card.window['context']} tokens"),
        ("tuned", tuned),
        *(("note", note) for note in card.notes),
    ]
    screen.print_facts(rows)
