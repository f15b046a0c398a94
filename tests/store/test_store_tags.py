import pytest

from mmqk.store import Tag, parse_tag, tag


@pytest.mark.parametrize(
    ("built", "text", "parts"),
    [
        (tag("loss"), "loss", Tag("loss")),
        (tag("loss", "image"), "loss/image", Tag("loss", "image")),
        (tag("q_norm", "text", layer=3), "q_norm/text/layer03", Tag("q_norm", "text", 3)),
        (
            tag("attn_logit_absmax", "text", "image", layer=3, head=2),
            "attn_logit_absmax/text-image/layer03/head02",
            Tag("attn_logit_absmax", "text-image", 3, 2),
        ),
        (tag("attn_logit_bound", layer=0), "attn_logit_bound/layer00", Tag("attn_logit_bound", None, 0)),
        (tag("q_norm", "text", layer=120), "q_norm/text/layer120", Tag("q_norm", "text", 120)),
    ],
)
def test_tags_are_built_and_parsed_as_the_contract_writes_them(built, text, parts):
    assert built == text
    assert parse_tag(text) == parts


def test_a_pair_is_query_then_key():
    assert parse_tag("attn_logit_max/text-image/layer03").pair == ("text", "image")
    assert parse_tag("q_norm/text/layer03").pair is None


def test_a_parameter_name_stands_where_the_modality_does():
    parsed = parse_tag("update_rms/blocks.0.attention.w_q.weight")
    assert (parsed.statistic, parsed.modality) == ("update_rms", "blocks.0.attention.w_q.weight")


@pytest.mark.parametrize(("names", "place"), [(("q", "layer03"), {}), (("q", "text-image"), {}), (("q/r", "text"), {})])
def test_what_could_not_be_parsed_back_is_refused(names, place):
    with pytest.raises(ValueError):
        tag(*names, **place)


@pytest.mark.parametrize("text", ["", "/text", "q//layer03", "q/text/image/layer03", "q/text/head02"])
def test_what_is_not_a_tag_is_a_statistic(text):
    assert parse_tag(text) == Tag(text)
