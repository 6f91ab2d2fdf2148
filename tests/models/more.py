"""More models and ways to train and generate: what is not on anybody's list of the usual ones."""

import torch
import transformers as hf
from library import SMALL, decoder, generate, images, tokens, train

LLAMA = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2}


def qwen2_beams(watch):
    """Beam search."""
    decoder(watch, hf.Qwen2ForCausalLM(hf.Qwen2Config(**LLAMA)), num_beams=3)


def gemma2_static_cache(watch):
    """Capped logits, sliding windows; generates into a cache of fixed size."""
    config = hf.Gemma2Config(**LLAMA, head_dim=8, sliding_window=4, attn_implementation="eager")
    decoder(
        watch, hf.Gemma2ForCausalLM(config), cache_implementation="static", disable_compile=True
    )


def checkpointed(watch):
    """Layers are recomputed in the backward pass."""
    model = hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA))
    model.gradient_checkpointing_enable()
    ids = tokens(2, 9)
    train(watch, model, {"input_ids": ids, "labels": ids})


def assisted(watch):
    """A smaller model proposes the next tokens."""
    model, helper = (hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)) for _ in range(2))
    # Above 0 it calls more functions where scikit-learn is installed.
    helper.generation_config.assistant_confidence_threshold = 0
    ids = {"input_ids": tokens(1, 5)}
    generate(watch, model, ids, do_sample=False, assistant_model=helper.eval())


def deberta(watch):
    config = hf.DebertaV2Config(
        **SMALL,
        intermediate_size=48,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_position_embeddings=32,
    )
    ids = tokens(2, 8)
    batch = {"input_ids": ids, "labels": torch.tensor([0, 1])}
    train(watch, hf.DebertaV2ForSequenceClassification(config), batch)


def clip(watch):
    text = SMALL | {"intermediate_size": 48, "max_position_embeddings": 16}
    vision = {k: v for k, v in text.items() if k != "vocab_size"}
    vision |= {"image_size": 16, "patch_size": 8}
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    batch = {"input_ids": tokens(2, 6), "pixel_values": torch.randn(2, 3, 16, 16)}
    train(watch, hf.CLIPModel(config), batch | {"return_loss": True})


def wav2vec2(watch):
    """Weight normalisation by parametrization, masks drawn at random."""
    config = hf.Wav2Vec2Config(
        **SMALL,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_kernel=(10, 3),
        conv_stride=(5, 2),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        mask_time_length=2,
        ctc_zero_infinity=True,
    )
    batch = {"input_values": torch.randn(2, 600), "labels": tokens(2, 4)}
    train(watch, hf.Wav2Vec2ForCTC(config), batch)


def swin(watch):
    config = hf.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
    )
    images(watch, hf.SwinForImageClassification(config), 32)


def convnext(watch):
    config = hf.ConvNextConfig(hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 2, 1], num_labels=5)
    images(watch, hf.ConvNextForImageClassification(config), 64)


def recurrent_gemma(watch):
    """Linear recurrences between attention layers, as an autograd function."""
    config = hf.RecurrentGemmaConfig(
        **SMALL | {"num_hidden_layers": 3},
        intermediate_size=64,
        lru_width=32,
        head_dim=8,
        num_key_value_heads=1,
        attention_window_size=8,
    )
    decoder(watch, hf.RecurrentGemmaForCausalLM(config))


def ia3(watch):
    from peft import IA3Config, get_peft_model

    config = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    model = get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), config)
    ids = tokens(2, 9)
    train(watch, model, {"input_ids": ids, "labels": ids})


def prefix_tuning(watch):
    from peft import PrefixTuningConfig, get_peft_model

    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA)), config)
    ids = tokens(2, 9)
    train(watch, model, {"input_ids": ids, "labels": ids})
