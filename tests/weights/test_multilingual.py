"""Test text towers with XLM-RoBERTa's vocabulary: sizes, weights and tokenizers like the Hub's, E5's
prefix, and exports. `test_text.py` compares outputs with transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import SentencePieceUnigramTokenizer
from torch.nn.functional import normalize

from clap_ds.config.model import ClapConfig, load_preset, parse_sizes
from clap_ds.config.schema import ShardData
from clap_ds.data.dataloader import build_batches
from clap_ds.evaluation.embedding import embed_text
from clap_ds.model.clap import ClapModel
from clap_ds.weights.hub import SPECIAL_TOKENS, load_pretrained_text, load_tokenizer, tokenize
from clap_ds.weights.key_mapping import config_to_transformers
from clap_ds.weights.open_clip_weights import model_cfg
from tests.data.tars import wav, write_tar
from tests.evaluation.conftest import tone
from tests.model.reference_clap import MICRO_TEXT

import transformers  # isort: skip

CAPTIONS = ["a dog barks", "ein Hund bellt – 犬", "собака лает"]


@pytest.fixture(scope="module")
def e5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like E5-small's on the Hub: a BERT that states to pad with 0, and
    XLM-RoBERTa's tokenizer, which pads with 1."""
    folder = tmp_path_factory.mktemp("multilingual-e5-small")
    unigram = SentencePieceUnigramTokenizer()
    texts = [*CAPTIONS, "query: "] * 20
    unigram.train_from_iterator(texts, 120, False, [*SPECIAL_TOKENS], unk_token="<unk>")
    vocabulary = [*map(tuple, json.loads(unigram.to_str())["model"]["vocab"])]
    transformers.XLMRobertaTokenizer(vocab=vocabulary).save_pretrained(folder)
    transformers.BertModel(transformers.BertConfig(**MICRO_TEXT)).save_pretrained(folder)
    return folder


def micro_with(**fields: object) -> ClapConfig:
    sizes = load_preset("micro").model_dump(mode="json")
    sizes["audio"]["num_samples"] = 480
    return parse_sizes({**sizes, "text": {**sizes["text"], **fields}}, "micro")


@pytest.mark.parametrize(
    ("preset", "kind", "sizes"),
    [
        ("xlm_roberta_base", "XLMRoberta", (250_002, 514, 768, 12, 12, 3072, 1)),
        ("multilingual_e5_small", "Bert", (250_037, 512, 384, 12, 12, 1536, 2)),
    ],
)
def test_text_towers_have_the_tensors_of_transformers(preset, kind, sizes):
    fields = dict(zip([*MICRO_TEXT, "type_vocab_size"], sizes, strict=True))
    config = getattr(transformers, f"{kind}Config")(**fields)
    with torch.device("meta"):
        theirs = getattr(transformers, f"{kind}Model")(config, add_pooling_layer=False)
        ours = ClapModel(load_preset(f"htsat_tiny_{preset}")).text.roberta
    # Other names or shapes are errors.
    ours.load_state_dict(theirs.state_dict(), assign=True)


@pytest.mark.parametrize("kind", ["XLMRoberta", "Camembert"])
def test_pretrained_towers_like_roberta_are_roberta(kind, tmp_path):
    fields = {**MICRO_TEXT, "layer_norm_eps": 1e-5, "type_vocab_size": 1}
    config = getattr(transformers, f"{kind}Config")(**fields)
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    text = micro_with(architecture=config.model_type, hub_name=str(tmp_path)).text
    assert (text.architecture, text.first_position) == ("roberta", 2)
    assert load_pretrained_text(text).config.model_type == config.model_type


def test_training_and_inference_put_e5s_prefix_before_captions(e5_folder, tmp_path):
    fields = {"architecture": "bert", "pad_token_id": 1, "layer_norm_eps": 1e-12, "pooling": "mean"}
    config = micro_with(**fields, hub_name=str(e5_folder), caption_prefix="query: ")
    model = ClapModel(config).eval().requires_grad_(False)
    model.text.roberta.load_state_dict(load_pretrained_text(config.text).state_dict())
    tokenizer = load_tokenizer(str(e5_folder), vocab_size=512)
    ids, mask = tokenize([f"query: {caption}" for caption in CAPTIONS], tokenizer, 40)
    members = [("0.wav", wav(tone(0))), ("0.txt", CAPTIONS[0].encode())]
    shards = str(write_tar(tmp_path / "clips.tar", members))
    options: Any = {"num_workers": 0, "shuffle_buffer": 0, "tokenizer": str(e5_folder)}
    data = ShardData(source="webdataset", shards=shards, **options)
    with build_batches(data, model=config, context_length=40) as batches:
        assert torch.equal(next(batches).input_ids, ids[:1])

    embedded = embed_text(model, CAPTIONS, tokenizer, 40, micro_batch=3)
    expected = normalize(model.encode_text(ids, mask))
    # fp32, in another order
    torch.testing.assert_close(embedded, expected, rtol=0, atol=16 * torch.finfo().eps)


def test_e5_small_is_exported_to_open_clip_alone():
    config = load_preset("htsat_tiny_multilingual_e5_small")
    with pytest.raises(ValueError, match="text tower is a bert with pooling 'mean', not a roberta"):
        config_to_transformers(config)
    # open_clip masks this id, and the model's configuration on the Hub states 0.
    assert model_cfg(config, 77)["text_cfg"]["hf_model_config"]["pad_token_id"] == 1
