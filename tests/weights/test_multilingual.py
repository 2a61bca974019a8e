"""Test text towers with XLM-RoBERTa's vocabulary: sizes, weights and tokenizers like the Hub's, E5's
prefix, and exports."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import SentencePieceUnigramTokenizer

import clap_ds
from clap_ds.checkpoint import export
from clap_ds.config.model import ClapConfig, load_preset, parse_sizes
from clap_ds.config.schema import ShardData
from clap_ds.data.dataloader import build_batches
from clap_ds.model.clap import ClapModel
from clap_ds.weights import hub, open_clip_weights
from clap_ds.weights.formats import Checkpoint
from clap_ds.weights.hub import load_pretrained_text, load_tokenizer, tokenize
from clap_ds.weights.key_mapping import config_to_transformers
from tests.data.tars import wav, write_tar
from tests.evaluation.conftest import tone
from tests.model.reference_clap import MICRO_TEXT
from tests.weights.fake_checkpoints import checkpoint_of

import transformers  # isort: skip

CAPTIONS = ["a dog barks", "ein Hund bellt – 犬", "犬が吠える", "собака лает"]
XLM_R = "htsat_tiny_xlm_roberta_base"
E5_BASE = "htsat_tiny_multilingual_e5_base"
E5_SMALL = "htsat_tiny_multilingual_e5_small"
XLM_R_SIZES = {
    "vocab_size": 250_002, "max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5,
}  # fmt: skip
E5_SMALL_SIZES = {
    "vocab_size": 250_037, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536,
}  # fmt: skip


@pytest.fixture(scope="module")
def e5_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like E5-small's on the Hub: a BERT that states to pad with 0, and
    XLM-RoBERTa's tokenizer, which pads with 1."""
    folder = tmp_path_factory.mktemp("multilingual-e5-small")
    unigram = SentencePieceUnigramTokenizer()
    unigram.train_from_iterator(
        [*CAPTIONS, "query: "] * 20, 120, False, [*hub.SPECIAL_TOKENS], unk_token="<unk>"
    )
    pieces = json.loads(unigram.to_str())["model"]["vocab"]
    vocabulary = [(piece, score) for piece, score in pieces]
    transformers.XLMRobertaTokenizer(vocab=vocabulary).save_pretrained(folder)
    transformers.BertModel(transformers.BertConfig(**MICRO_TEXT)).save_pretrained(folder)
    return folder


@pytest.fixture
def e5(e5_folder: Path) -> ClapConfig:
    """Return the micro model with that tower."""
    sizes = load_preset("micro").model_dump(mode="json")
    sizes["audio"]["num_samples"] = 480
    fields = {"architecture": "bert", "pad_token_id": 1, "layer_norm_eps": 1e-12, "pooling": "mean"}
    sizes["text"] |= {**fields, "hub_name": str(e5_folder), "caption_prefix": "query: "}
    return parse_sizes(sizes, "e5")


@pytest.mark.parametrize(
    ("preset", "kind", "sizes", "millions"),
    [
        (XLM_R, "XLMRoberta", XLM_R_SIZES, 277.5),
        (E5_BASE, "XLMRoberta", XLM_R_SIZES, 277.5),
        (E5_SMALL, "Bert", E5_SMALL_SIZES, 117.5),
    ],
)
def test_text_towers_have_the_tensors_of_transformers(preset, kind, sizes, millions):
    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        expected = getattr(transformers, f"{kind}Model")(config, add_pooling_layer=False)
        ours = ClapModel(load_preset(preset)).text.roberta
    shapes = {name: tensor.shape for name, tensor in expected.named_parameters()}
    assert {name: tensor.shape for name, tensor in ours.named_parameters()} == shapes
    num_parameters = sum(shape.numel() for shape in shapes.values())
    assert num_parameters / 1e6 == pytest.approx(millions, abs=0.05)


def test_hub_folder_gives_weights_and_tokenizer(e5, e5_folder):
    text = e5.text
    assert load_pretrained_text(text).config.model_type == "bert"
    tokenizer = load_tokenizer(str(e5_folder), vocab_size=512, pad_token_id=text.pad_token_id)
    ids, mask = tokenize(CAPTIONS, tokenizer, 40)
    lengths = mask.sum(dim=1)
    for row, length, caption in zip(ids.tolist(), lengths.tolist(), CAPTIONS, strict=True):
        assert (row[0], row[length - 1], row[length:]) == (0, 2, [1] * (40 - length))
        assert tokenizer.decode(row, skip_special_tokens=True) == caption
    # BERT's own padding would be XLM-RoBERTa's <s>.
    with pytest.raises(ValueError, match="pads with 1; expected .* 0 for padding"):
        load_tokenizer(str(e5_folder), vocab_size=512, pad_token_id=0)


@pytest.mark.parametrize("kind", ["XLMRoberta", "Camembert"])
def test_pretrained_towers_like_roberta_are_roberta(kind, tmp_path):
    config = getattr(transformers, f"{kind}Config")(
        **MICRO_TEXT, layer_norm_eps=1e-5, type_vocab_size=1
    )
    getattr(transformers, f"{kind}Model")(config).save_pretrained(tmp_path)
    sizes = load_preset("micro").model_dump(mode="json")
    sizes["text"] |= {"architecture": config.model_type, "hub_name": str(tmp_path)}
    text = parse_sizes(sizes, "micro").text
    assert (text.architecture, text.first_position) == ("roberta", 2)
    assert load_pretrained_text(text).config.model_type == config.model_type


def test_padding_that_would_shift_robertas_positions_is_rejected():
    sizes = load_preset("micro").model_dump(mode="json")
    sizes["text"]["pad_token_id"] = 0
    with pytest.raises(ValueError, match="pad_token_id 0: RoBERTa's is 1"):
        parse_sizes(sizes, "micro")


def test_training_and_inference_put_the_prefix_before_captions(e5, e5_folder, tmp_path):
    tokenizer = load_tokenizer(str(e5_folder), vocab_size=512)
    texts = [f"query: {caption}" for caption in CAPTIONS]
    ids, mask = tokenize(texts, tokenizer, 40)
    members = []
    for number, caption in enumerate(CAPTIONS):
        members.append((f"{number}.wav", wav(tone(number))))
        members.append((f"{number}.txt", caption.encode()))
    shards = str(write_tar(tmp_path / "clips.tar", members))
    data = ShardData(
        source="webdataset",
        shards=shards,
        tokenizer=str(e5_folder),
        num_workers=0,
        shuffle_buffer=0,
    )
    with build_batches(data, model=e5, context_length=40, micro_batch=4) as batches:
        batch = next(batches)
    rows = {tuple(row) for row in batch.input_ids.tolist()}
    assert rows == {tuple(row) for row in ids.tolist()}

    model = ClapModel(e5).eval()
    path = checkpoint_of(
        model, tmp_path / "run", tokenizer=e5_folder, settings={"clap": {"context_length": 40}}
    )
    embedded = torch.from_numpy(clap_ds.load(path).embed_text(CAPTIONS))
    with torch.no_grad():
        expected = torch.nn.functional.normalize(model.encode_text(ids, mask))
    # fp32, in another order
    torch.testing.assert_close(embedded, expected, rtol=0, atol=16 * torch.finfo().eps)


def test_embeddings_of_another_prefix_have_another_fingerprint(e5):
    state = ClapModel(e5).state_dict()
    prints = set()
    for changes in ({}, {"caption_prefix": ""}, {"pad_token_id": 0}, {"hub_name": ""}):
        text = e5.text.model_copy(update=changes)
        prints.add(Checkpoint(e5.model_copy(update={"text": text}), state).fingerprint)
    assert len(prints) == 2


@pytest.mark.parametrize("pooling", ["cls_pooler", "mean"])
def test_exports_say_what_other_libraries_lack(pooling):
    """ClapModel's text tower is RoBERTa with its pooler, of any vocabulary."""
    config = load_preset(XLM_R)
    projection = config.audio.projection
    text = config.text.model_copy(update={"pooling": pooling, "projection": projection})
    config = config.model_copy(update={"text": text})
    if pooling == "cls_pooler":
        assert config_to_transformers(config).text_config.vocab_size == 250_002
        return
    with pytest.raises(ValueError, match="a roberta with pooling 'mean', not a roberta with"):
        config_to_transformers(config)
    with pytest.raises(ValueError, match="text tower is a bert with pooling 'mean'"):
        config_to_transformers(load_preset(E5_SMALL))


def test_open_clip_masks_the_tokenizers_padding():
    """It reads the id from the configuration, and E5-small's on the Hub states 0."""
    text = open_clip_weights.model_cfg(load_preset(E5_SMALL), 77)["text_cfg"]
    assert text["hf_model_config"] == {"layer_norm_eps": 1e-12, "pad_token_id": 1}
    assert (text["hf_pooler_type"], text["hf_proj_type"]) == ("mean_pooler", "mlp")
