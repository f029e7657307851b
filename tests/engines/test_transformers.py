"""Language models of `transformers` train on the batched engine: padding masks from the data, tied embeddings, grouped queries."""

import numpy as np
import pytest
import torch

import mimicfl as mf

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}


def gpt2():
    still = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_positions=12, n_embd=16, n_layer=2, n_head=2, **still))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def bert(dropout=0.0):
    config = transformers.BertConfig(**SMALL, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, num_labels=4)
    return transformers.BertForSequenceClassification(config)


def run(model, engine, labels, **more):
    words = torch.randint(0, 50, (60, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(words)
    mask[::3, 8:] = 0
    y = words.roll(-1, 1) if labels == "words" else torch.arange(60) % 4
    x, notices = {"input_ids": words, "attention_mask": mask}, []
    data = mf.Data(x, y, {name: value[:10] for name, value in x.items()}, y[:10])
    split, local = np.split(np.arange(60), [20, 27, 50]), mf.LocalSGD(epochs=1, batch_size=8, lr=0.05)
    found = mf.simulate(model=model, data=data, split=split, rounds=2, local=local, engine=engine, notice=notices.append, seed=0, **more)
    return found, notices


@pytest.mark.slow
@pytest.mark.parametrize(("make", "labels"), [(gpt2, "words"), (llama, "words"), (bert, "classes")])
def test_equals_plain(make, labels):
    torch.manual_seed(0)
    model, more = make().double(), {"task": "token-prediction"} if labels == "words" else {}
    plain, (ours, notices) = run(model, "plain", labels, **more)[0], run(model, "batched:3", labels, **more)
    assert notices == ["engine batched"]
    torch.testing.assert_close(ours.params, plain.params, rtol=0, atol=1e-9)
    assert not torch.compiler.is_compiling()


@pytest.mark.slow
def test_dropout_inside_attention_is_keyed():
    model = bert(0.3)
    first, notices = run(model, "batched:3", "classes")
    assert notices == ["engine batched"]
    assert torch.equal(first.params, run(model, "batched:3", "classes")[0].params)
