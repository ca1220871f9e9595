#!/usr/bin/env python3
"""Uses a server through the OpenAI client, as a user's program would, and reports the first answer that this client does not expect.

usage: openai_client.py URL MODEL
"""

import concurrent.futures
import sys

import openai


def expect(what, is_so):
    if not is_so:
        sys.exit(f"openai_client.py: {what}")
    print(what)


def refused(what, kind, call):
    try:
        call()
    except kind as e:
        print(f"{what}: {type(e).__name__} {e.status_code}")
    else:
        sys.exit(f"openai_client.py: {what}: no {kind.__name__}")


def completions(client, model):
    whole = client.completions.create(model=model, prompt="Once upon a time", max_tokens=7)
    expect("a completion has its tokens and its reason", whole.usage.completion_tokens == 7 and whole.choices[0].finish_reason == "length")
    expect("usage adds up", whole.usage.total_tokens == whole.usage.prompt_tokens + 7)
    ids = client.completions.create(model=model, prompt=[11, 12, 13], max_tokens=2)
    expect("token ids are a prompt", ids.usage.prompt_tokens == 3)
    chunks = list(client.completions.create(model=model, prompt="Once", max_tokens=7, stream=True, stream_options={"include_usage": True}))
    texts = [c for c in chunks if c.choices]
    expect("a stream has one chunk a token", len(texts) == 7 and all(c.choices[0].text for c in texts))
    expect("the last one has the reason", [c.choices[0].finish_reason for c in texts] == [None] * 6 + ["length"])
    expect("then comes usage alone", not chunks[-1].choices and chunks[-1].usage.completion_tokens == 7)
    expect("all chunks have one id", len({c.id for c in chunks}) == 1)
    expect("without asking there is no usage", all(c.usage is None for c in client.completions.create(model=model, prompt="Once", max_tokens=3, stream=True)))


def chats(client, model):
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    whole = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=5)
    expect("a chat has its tokens and its role", whole.usage.completion_tokens == 5 and whole.choices[0].message.role == "assistant")
    chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}))
    texts = [c for c in chunks if c.choices and c.choices[0].delta.content]
    expect("a chat's stream begins with the role", chunks[0].choices[0].delta.role == "assistant")
    expect("and has one chunk a token", len(texts) == 5)
    expect("and ends with usage", chunks[-1].usage.completion_tokens == 5)
    text = "".join(c.choices[0].delta.content for c in texts)
    try:
        with client.chat.completions.stream(model=model, messages=messages, max_tokens=5) as stream:
            final = stream.get_final_completion()
    except openai.LengthFinishReasonError as e:  # the client raises this for an answer that ends at max_tokens
        final = e.completion
    expect("the client's own accumulation of a stream works", final.choices[0].message.content == text)


def errors(client, url, model):
    create = client.completions.create
    refused("a model that is not there", openai.NotFoundError, lambda: create(model="no/such", prompt="x"))
    refused("a prompt that is too long", openai.BadRequestError, lambda: create(model=model, prompt=[5] * 5000, max_tokens=10))
    refused("max_tokens of 0", openai.BadRequestError, lambda: create(model=model, prompt="x", max_tokens=0))
    refused("a path that is not there", openai.NotFoundError, lambda: client.responses.retrieve("x"))
    stranger = openai.OpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0, timeout=30)
    refused("a wrong key", openai.AuthenticationError, lambda: stranger.models.list())


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=url + "/v1", api_key="right", max_retries=0, timeout=30)
    expect("the model is listed", [m.id for m in client.models.list()] == [model])
    completions(client, model)
    chats(client, model)
    errors(client, url, model)
    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        done = list(pool.map(lambda i: client.completions.create(model=model, prompt=f"{i} times", max_tokens=20), range(64)))
    expect("64 requests, 32 at a time, are answered", all(d.usage.completion_tokens == 20 for d in done))


main()
