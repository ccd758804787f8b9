"""Distillation: a divergence between student and teacher, over the whole vocabulary, without the logits."""
