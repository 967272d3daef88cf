"""Training programs and their parts: pretraining of the embedded target, distillation of draft
experts, evaluation, the demo."""
