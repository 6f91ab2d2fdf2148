"""Models of `transformers`: random weights, tiny, nothing downloaded. Two training steps, then
what the model is for."""

import torch
import transformers as hf

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokens(*shape):
    return torch.randint(3, 97, shape)


def train(watch, model, batch, steps=2):
    """Steps of SGD with clipping; the losses, outputs, gradients and weights are kept."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(steps):
        with watch(model):
            optimizer.zero_grad()
            output = model(**batch)
            output.loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        watch.keep(norm=norm, **output)
        watch.keep(model=model)


def generate(watch, model, inputs, **how):
    model.eval()
    with watch(model):
        found = model.generate(**inputs, max_new_tokens=5, pad_token_id=0, **how)
    watch.keep(generated=found)


def decoder(watch, model, **how):
    batch = {"input_ids": tokens(2, 9)}
    train(watch, model, batch | {"labels": batch["input_ids"]})
    generate(watch, model, {"input_ids": batch["input_ids"][:, :4]}, do_sample=False, **how)


def llama(watch):
    config = hf.LlamaConfig(**SMALL, intermediate_size=64, num_key_value_heads=2)
    decoder(watch, hf.LlamaForCausalLM(config))


def gpt2(watch):
    config = hf.GPT2Config(vocab_size=97, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    decoder(watch, hf.GPT2LMHeadModel(config))


def mixtral(watch):
    # The experts are chosen into torch.empty: give that a known content.
    torch.use_deterministic_algorithms(True, warn_only=True)
    config = hf.MixtralConfig(
        **SMALL,
        intermediate_size=48,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    decoder(watch, hf.MixtralForCausalLM(config))


def mamba(watch):
    config = hf.MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4)
    decoder(watch, hf.MambaForCausalLM(config))


def bert(watch):
    config = hf.BertConfig(**SMALL, intermediate_size=64, max_position_embeddings=32)
    model = hf.BertForMaskedLM(config)
    ids = tokens(2, 11)
    mask = torch.ones_like(ids)
    mask[1, 7:] = 0
    train(watch, model, {"input_ids": ids, "attention_mask": mask, "labels": ids})
    model.eval()
    with torch.no_grad(), watch(model):
        output = model(ids, attention_mask=mask)
    watch.keep(logits=output.logits)


def t5(watch):
    config = hf.T5Config(
        vocab_size=97,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    model = hf.T5ForConditionalGeneration(config)
    ids = tokens(2, 9)
    train(watch, model, {"input_ids": ids, "labels": tokens(2, 6)})
    generate(watch, model, {"input_ids": ids}, do_sample=True, top_k=20)


def whisper(watch):
    config = hf.WhisperConfig(
        vocab_size=97,
        num_mel_bins=8,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=20,
        max_target_positions=24,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = hf.WhisperForConditionalGeneration(config)
    sound = {"input_features": torch.randn(2, 8, 40)}
    train(watch, model, sound | {"labels": tokens(2, 6)})
    generate(watch, model, sound, do_sample=False)


def vit(watch):
    config = hf.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )
    images(watch, hf.ViTForImageClassification(config), 16)


def resnet(watch):
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )
    images(watch, hf.ResNetForImageClassification(config), 32)


def images(watch, model, size):
    pixels = torch.randn(3, 3, size, size)
    train(watch, model, {"pixel_values": pixels, "labels": torch.tensor([0, 3, 4])})
    model.eval()
    with torch.no_grad(), watch(model):
        output = model(pixels)
    watch.keep(logits=output.logits)
