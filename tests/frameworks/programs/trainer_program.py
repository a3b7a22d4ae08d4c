"""The Hugging Face Trainer with a small model made from its configuration."""

import sys

import torch
import torch.distributed as dist
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

set_seed(0)
draw = torch.Generator().manual_seed(1)
data = [
    {"input_ids": torch.randint(0, 50, (8,), generator=draw), "labels": torch.randint(0, 2, (), generator=draw)}
    for _ in range(48)
]
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
config = BertConfig(vocab_size=50, **sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
arguments = TrainingArguments(
    output_dir=sys.argv[1], use_cpu=True, per_device_train_batch_size=6, num_train_epochs=1, report_to=[],
    save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=1e-2,
)  # fmt: skip
trainer = Trainer(BertForSequenceClassification(config), arguments, train_dataset=data)
trainer.train()
loss = trainer.evaluate(data)["eval_loss"]
if dist.get_rank() == 0:
    total = sum(float(p.detach().double().abs().sum()) for p in trainer.model.parameters())
    print(f"group {type(dist.group.WORLD).__name__} {dist.get_backend()} loss {loss:.6f} weights {total!r}")
