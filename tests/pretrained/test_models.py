"""The models in examples/pretrained/ agree with transformers, also after import and export."""

import functools
import json
import shutil
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

import eqxlike as eqx
from eqxlike import nn, train
from examples.pretrained import bert, gpt2, llama, resnet, vit

SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
IMAGE = {"num_labels": 5, "image_size": 32, "patch_size": 8}

CONFIGS = {
    "gpt2": transformers.GPT2Config(
        n_embd=16, n_head=4, n_layer=3, vocab_size=40, n_positions=64, bos_token_id=0,
        eos_token_id=None, pad_token_id=0,
    ),
    "llama": transformers.LlamaConfig(**GROUPED, rope_parameters=LLAMA3),
    "llama biases tied": transformers.LlamaConfig(
        **GROUPED, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral": transformers.MistralConfig(**GROUPED, sliding_window=4),
    "qwen2": transformers.Qwen2Config(
        **GROUPED, tie_word_embeddings=True
    ),
    "qwen3": transformers.Qwen3Config(**GROUPED, head_dim=6),
    "bert": transformers.BertConfig(**SIZES),
    "vit": transformers.ViTConfig(**SIZES, **IMAGE),
    "resnet": transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 16], depths=[2, 2, 1], num_labels=5,
        layer_type="basic",
    ),
    "resnet bottleneck": transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[32, 64], depths=[2, 1], num_labels=5
    ),
}  # fmt: skip
DECODERS = [name for name in CONFIGS if name.split()[0] not in ("bert", "vit", "resnet")]
THEIRS = {
    "bert": transformers.BertForMaskedLM,
    "vit": transformers.ViTForImageClassification,
    "resnet": transformers.ResNetForImageClassification,
}


def saved(name, folder, **options):
    """Makes a transformers model with random arrays, in eval mode, and saves it in `folder`."""
    torch.manual_seed(0)
    theirs = THEIRS.get(name.split()[0], transformers.AutoModelForCausalLM)
    make = theirs.from_config if name in DECODERS else theirs
    model = make(CONFIGS[name]).eval()
    with torch.no_grad():
        for key, array in model.state_dict().items():
            if "running_var" in key:
                array.uniform_(0.5, 2)
            elif array.ndim < 2 and array.is_floating_point():
                array.add_(0.5 * torch.randn_like(array))
            elif array.is_floating_point():
                array.normal_(0, array[0].numel() ** -0.5)
    model.save_pretrained(folder, **options)
    return model


def loaded(name, folder):
    """Our model with the arrays of the checkpoint in `folder`, and its table of names."""
    config = json.loads((folder / "config.json").read_text())
    match name.split()[0]:
        case "gpt2":
            make, names, ignore = gpt2.GPT2, gpt2.names(), gpt2.IGNORE
        case "bert":
            make, names, ignore = bert.BERT, bert.NAMES, bert.IGNORE
        case "vit":
            make, names, ignore = vit.ViT, vit.NAMES, ()
        case "resnet":
            make, names, ignore = nn.make_with_state(resnet.ResNet), resnet.NAMES, ()
        case _:
            make, names, ignore = llama.Llama, llama.names(config), ()
    like = eqx.filter_eval_shape(functools.partial(make, config), key=jr.key(0))
    return train.import_safetensors(like, folder, names, ignore=ignore), names


def logits(name, ours, theirs) -> tuple[Any, Any]:
    """The logits of both models for the same input."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 40, (2, 11))
    images = random.normal(size=(2, 3, 32, 32)).astype("f4")
    with torch.no_grad():
        match name.split()[0]:
            case "bert":
                types, mask = random.integers(0, 2, (2, 11)), np.arange(11) < np.array([[11], [6]])
                expected = theirs(
                    torch.tensor(tokens),
                    token_type_ids=torch.tensor(types),
                    attention_mask=torch.tensor(mask).long(),
                ).logits
                found = jax.vmap(ours)(tokens, types, mask)
                # The logits of padding are not compared.
                return found[mask], expected[torch.tensor(mask)]
            case "vit":
                return jax.vmap(ours)(images), theirs(torch.tensor(images)).logits
            case "resnet":
                model, state = ours
                model = nn.inference_mode(model)
                found = jax.vmap(lambda image: model(image, state)[0])(images)
                return found, theirs(torch.tensor(images)).logits
            case _:
                found = jax.vmap(lambda row: ours(row)[0])(tokens)
                return found, theirs(torch.tensor(tokens)).logits


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_of_transformers_are_imported_and_exported(name, tmp_path):
    theirs = saved(name, tmp_path / "theirs", max_shard_size="20KB")
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    ours, names = loaded(name, tmp_path / "theirs")
    found, expected = logits(name, ours, theirs)
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-5, rtol=1e-5)

    (tmp_path / "ours").mkdir()
    shutil.copy(tmp_path / "theirs/config.json", tmp_path / "ours")
    train.export_safetensors(ours, tmp_path / "ours", names)
    again, info = type(theirs).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    _, back = logits(name, ours, again.eval())
    assert torch.equal(back, expected)


def test_original_checkpoint_of_gpt2_is_read(tmp_path):
    """The original names have no prefix, and the file contains attention masks."""
    saved("gpt2", tmp_path)
    expected, _ = loaded("gpt2", tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    first = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 64, 64), "f4") for i in range(3)}
    save_file(first | masks, tmp_path / "first.safetensors")
    found = train.import_safetensors(
        expected, tmp_path / "first.safetensors", gpt2.names(prefix=""), ignore=gpt2.IGNORE
    )
    assert eqx.tree_equal(found, expected)


def test_original_checkpoint_of_bert_is_read(tmp_path):
    """The original file has other names for the arrays of norms, and arrays for other tasks."""
    saved("bert", tmp_path)
    expected, _ = loaded("bert", tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")

    def old(name):
        return name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta")

    others = ("bert.pooler.dense.weight", "cls.seq_relationship.bias", "cls.predictions.decoder.w")
    first = {old(name): array for name, array in arrays.items()} | dict.fromkeys(others, np.ones(2))
    assert len(set(first) - set(arrays)) == 19
    save_file(first, tmp_path / "first.safetensors")
    found = train.import_safetensors(
        expected, tmp_path / "first.safetensors", bert.OLD_NAMES, ignore=bert.IGNORE
    )
    assert eqx.tree_equal(found, expected)


def test_old_and_new_configurations_of_rotary_positions_are_read():
    later = CONFIGS["llama"].to_dict()
    earlier = {name: value for name, value in later.items() if name != "rope_parameters"}
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    earlier |= {"rope_theta": LLAMA3["rope_theta"], "rope_scaling": scaling}
    old, new = (
        eqx.filter_eval_shape(llama.Llama, config, key=jr.key(0)) for config in (earlier, later)
    )
    assert old.blocks.layers.attention.rotary == new.blocks.layers.attention.rotary
    assert new.blocks.layers.attention.rotary.theta == 500


def test_sliding_window_in_only_some_layers_is_refused():
    config = CONFIGS["qwen2"].to_dict() | {"use_sliding_window": True}
    with pytest.raises(ValueError, match="not all layers of Qwen have the window"):
        llama.Llama(config, key=jr.key(0))


@pytest.mark.parametrize("name", DECODERS)
def test_generated_tokens_equal_tokens_of_transformers(name, tmp_path):
    theirs = saved(name, tmp_path)
    ours, _ = loaded(name, tmp_path)
    lengths, num_new = np.array([9, 4, 1]), 14
    prompts = np.random.default_rng(1).integers(1, 40, (3, 9))
    # transformers pads on the left.
    is_token = np.arange(9) >= 9 - lengths[:, None]
    padded = np.stack([np.roll(row, 9 - n) for row, n in zip(prompts, lengths, strict=True)])
    expected = theirs.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(is_token).long(),
        do_sample=False,
        max_new_tokens=num_new,
    )[:, 9:]
    options = {"lengths": lengths, "max_new_tokens": num_new, "sampler": nn.Sampler(temperature=0)}
    for model in (ours, lambda tokens: ours(tokens)[0]):
        assert nn.generate(model, prompts, **options).tolist() == expected.tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 12, "top_p": 0.9},
        {"top_p": 0.95, "min_p": 0.02},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_sampler_has_the_distribution_of_transformers(settings):
    processors = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    settings = {"temperature": 0.7} | settings
    logits = 3 * np.random.default_rng(0).normal(size=(20, 50)).astype("f4")
    expected = torch.tensor(logits)
    for name, value in settings.items():
        expected = processors[name](value)(None, expected)
    found = jax.vmap(nn.Sampler(**settings).filter)(logits)
    assert np.array_equal(np.isinf(found), torch.isinf(expected).numpy())
    np.testing.assert_allclose(jax.nn.softmax(found), expected.softmax(-1).numpy(), atol=1e-6)
