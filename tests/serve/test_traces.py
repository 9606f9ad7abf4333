"""The public formats: what a reader of them must find, and errors that name file and line."""

from pathlib import Path

import numpy as np
import pytest

from shardlab.serve.traces import azure, mooncake

SAMPLES = Path(__file__).parents[1] / "data"  # made for these tests, nothing in them is from the real ones
REAL = Path(__file__).parents[3] / "shared" / "data"


def real(name):
    if not (REAL / name).exists():
        pytest.skip(f"{name} is not here: it is not part of this repository")
    return REAL / name


def test_azure_sample():
    requests = azure(SAMPLES / "azure_sample.csv", vocab=100)
    assert len(requests) == 12 and [r.number for r in requests] == list(range(12))
    assert [(len(r.prompt), r.new_tokens) for r in requests[:3]] == [(4047, 137), (764, 238), (770, 21)]
    assert requests[0].arrival == 0 and requests[1].arrival == pytest.approx(0.074562, abs=2e-6)
    assert requests[6].arrival == pytest.approx(3.767115, abs=2e-6), "over midnight, on a 29th of February"
    again, other = (azure(SAMPLES / "azure_sample.csv", vocab=100, seed=seed) for seed in (0, 1))
    assert requests == again != other
    assert {token for r in requests for token in r.prompt} == set(range(100))


def test_mooncake_sample_has_equal_tokens_where_ids_are_equal_and_only_there():
    requests = mooncake(SAMPLES / "mooncake_sample.jsonl", vocab=1000)
    assert [(len(r.prompt), r.new_tokens, r.arrival) for r in requests[4:6]] == [(2013, 32, 0.0), (1492, 189, 3.0)]
    second, third, fourth = requests[1].prompt, requests[2].prompt, requests[3].prompt  # ids 0 1 4 5 6, 0 1 4 5 7, 0 2
    assert second[:2048] == third[:2048] and second[2048:2058] != third[2048:2058]
    assert second[:512] == fourth[:512] and second[512:969] != fourth[512:]
    assert second[:512] != second[512:1024], "blocks of one prompt differ too"
    assert requests == mooncake(SAMPLES / "mooncake_sample.jsonl", 1000)
    assert requests[0].prompt != mooncake(SAMPLES / "mooncake_sample.jsonl", 1000, seed=1)[0].prompt


HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
GOOD = '{"timestamp": 0, "input_length": 513, "output_length": 5, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize("reader, text, said", [
    (azure, "", "line 1: the columns are missing, not TIMESTAMP,ContextTokens,GeneratedTokens"),
    (azure, "TIMESTAMP,In,Out\n", "line 1: the columns are TIMESTAMP,In,Out"),
    (azure, HEAD.partition("\n")[0] + "\n", "has no requests"),
    (azure, HEAD + "2023-11-16 18:15:46,374\n", "line 3: 2 columns, not 3"),
    (azure, HEAD + "\nyesterday,374,44\n", "line 4: TIMESTAMP must be like 2023-11-16 18:.*, not 'yesterday'"),
    (azure, HEAD + "2023-11-16 18:15:46,many,44\n", "line 3: ContextTokens must be a whole number .* 1, not 'many'"),
    (azure, HEAD + "2023-11-16 18:15:46,374,0\n", "line 3: GeneratedTokens must be a whole number .* 1, not 0"),
    (azure, HEAD + "2023-11-16 18:15:46,374,-5\n", "line 3: GeneratedTokens must be a whole number .* 1, not '-5'"),
    (azure, HEAD + "2023-11-16 18:15:46,99999999999999,44\n", "line 3: ContextTokens is 99,999,999,999,999, and no"),
    (mooncake, "\n", "has no requests"),
    (mooncake, GOOD + "{\n", "line 2: Expecting property name"),
    (mooncake, GOOD + "[0, 1]\n", "line 2: a JSON object with timestamp, .* should be here, not \\[0, 1\\]"),
    (mooncake, GOOD + '{"timestamp": 0}\n', "line 2: a JSON object with timestamp, input_length"),
    (mooncake, GOOD.replace(": 0,", ": -1,"), "line 1: timestamp must be milliseconds, 0 or more, not -1"),
    (mooncake, GOOD.replace(": 0,", ": NaN,"), "line 1: timestamp must be milliseconds"),
    (mooncake, GOOD.replace("513", "512"), "line 1: 512 tokens are 1 blocks of 512, but hash_ids has 2 ids"),
    (mooncake, GOOD.replace("513", "5.5"), "line 1: input_length must be a whole number"),
    (mooncake, GOOD.replace("[0, 1]", "7"), "line 1: 513 tokens are 2 blocks of 512, but hash_ids has 7"),
    (mooncake, GOOD.replace("[0, 1]", "[0, -1]"), "line 1: a hash id must be a whole number of at least 0, not -1"),
])
def test_a_bad_line_is_named(tmp_path, reader, text, said):
    path = tmp_path / "trace.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said) as error:
        reader(path, vocab=10)
    assert str(path) in str(error.value)


def test_lines_out_of_order_are_put_in_order_and_a_byte_order_mark_is_none(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xef\xbb\xbf" + HEAD.encode() + b"2023-11-16 18:15:45.6805900,5,6\r\n\r\n")
    assert [(r.number, len(r.prompt), r.arrival) for r in azure(path, 10)] == [(0, 5, 0), (1, 374, 1)]
    path.write_bytes(HEAD.encode() + b"2023-11-16 18:15:\xff,5,6\n")
    with pytest.raises(ValueError, match="line 3: TIMESTAMP"):
        azure(path, 10)


@pytest.mark.parametrize("name, count, span, prompts, outs, variation", [
    ("AzureLLMInferenceTrace_code.csv", 8819, 3435.9, (2047.8, 1469, 7436, 7437), (27.9, 13, 252, 1899), 13.2),
    ("AzureLLMInferenceTrace_conv.csv", 19366, 3501.7, (1154.7, 1020, 4142, 14050), (211.1, 129, 601, 1000), 1.09),
])
def test_the_real_azure_traces(name, count, span, prompts, outs, variation):
    requests = azure(real(name), vocab=2)
    assert len(requests) == count and requests[-1].arrival == pytest.approx(span, abs=0.05)
    for lengths, expected in (([len(r.prompt) for r in requests], prompts), ([r.new_tokens for r in requests], outs)):
        found = np.mean(lengths), np.median(lengths), np.percentile(lengths, 99), max(lengths)
        assert [round(value, 1) for value in found] == pytest.approx(expected, abs=0.5)
    gaps = np.diff([r.arrival for r in requests])
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.01)


def test_the_real_mooncake_trace():
    requests = mooncake(real("mooncake_conversation_first12min.jsonl"), vocab=1000)
    assert len(requests) == 2154 and requests[-1].arrival == 717
    assert np.mean([len(r.prompt) for r in requests]) == pytest.approx(13655.7, abs=0.05)
    assert np.mean([r.new_tokens for r in requests]) == pytest.approx(350.5, abs=0.05)
    seen, hits, blocks = set(), 0, 0  # a cache that keeps everything, of whole prefixes
    for request in requests:
        key = 0
        for start in range(0, len(request.prompt), 512):
            key = hash((key, request.prompt[start : start + 512].tobytes()))
            hits, blocks = hits + (key in seen), blocks + 1
            seen.add(key)
    assert hits / blocks == pytest.approx(0.287, abs=0.0005)
