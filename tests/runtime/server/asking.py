"""Small requests, and what every refusal looks like."""

COMPLETION = {"model": "tiny", "prompt": "hi"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}


def post(server, route, body):
    return server.http.post(f"/v1/{route}", json=body)


def refusal(response, status=400):
    """The error's fields, once its shape is right."""
    assert response.status_code == status, response.text
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error
