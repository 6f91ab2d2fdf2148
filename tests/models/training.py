"""Training with `peft`, the Trainer of `transformers` and `accelerate`."""

import tempfile

import torch
import transformers as hf
from accelerate import Accelerator
from library import SMALL, generate, tokens, train
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset


def small_llama():
    config = hf.LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2)
    return hf.LlamaForCausalLM(config)


def lora(watch):
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model = get_peft_model(small_llama(), adapters)
    ids = tokens(2, 9)
    train(watch, model, {"input_ids": ids, "labels": ids})
    generate(watch, model, {"input_ids": ids[:, :4]}, do_sample=False)


class Sentences(Dataset):
    def __init__(self, count):
        self.ids = tokens(count, 8)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Watched(hf.TrainerCallback):
    """Every optimizer step is a watched step."""

    def __init__(self, watch):
        self.watch = watch

    def on_step_begin(self, args, state, control, model, **_):
        self.watch.start(model)

    def on_step_end(self, args, state, control, **_):
        self.watch.stop()


def trainer(watch, **more):
    """Accumulates gradients and clips them, as it does by default."""
    model = small_llama()
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(
            folder,
            max_steps=2,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            report_to=[],
            use_cpu=True,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            **more,
        )
        training = hf.Trainer(
            model, arguments, train_dataset=Sentences(12), callbacks=[Watched(watch)]
        )
        training.train()
    losses = [entry["loss"] for entry in training.state.log_history if "loss" in entry]
    watch.keep(losses=torch.tensor(losses), model=model)


def accelerate(watch):
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(Sentences(8), batch_size=2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with watch(model), accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        watch.keep(loss=loss, model=model)
