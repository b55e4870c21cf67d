"""Redaction: a corpus of forms that secrets have in text, and of texts that only look like them."""

import json
import re
import time
from urllib.parse import quote

import pytest

from core.redact import Redactor, redact, redact_lines, redact_values

# No two of them share a part that a pattern could find by accident. None was ever valid.
S = "uUbV8q0nC2/xYt7LhR4wZ+e1sJd5oKfA9mQ3gPi6B0c="
HEX = "9f3b1c7e5a2d4f608b7c6d5e4f3a2b1c0d9e8f7a6b5c4d3e2f1a0b9c8d7e6f50"
JWT = "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.eyJpc3MiOiJrdWJlcm5ldGVzIiwic3ViIjoieCJ9.c2lnbmF0dXJlLW9mLXRoaXM_-x"
SAS = "uUbV8q0nC2%2FxYt7LhR4wZ%2Be1sJd5oKfA9mQ3gPi6B0c%3D"
PEM_BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7"
BUCKET = "https://bucket.s3.eu-central-1.amazonaws.com/kopia/app/kopia.repository"
ACCOUNT = "https://account.blob.core.windows.net/container/kopia/app"

SECRETS: dict[str, tuple[str, str]] = {
    # shared access signatures of Azure
    "sas": (f"GET {ACCOUNT}?sv=2024-11-04&ss=b&srt=co&sp=rwdl&se=2026-12-01T00:00:00Z&sig={SAS}", SAS),
    "sas first": (f"{ACCOUNT}?sig={SAS}&sv=2024-11-04", SAS),
    "sas without its url": (f"sv=2024-11-04&sr=c&sp=rl&sig={SAS}", SAS),
    "sas in quotes": (f'Put "{ACCOUNT}?sp=racw&sig={SAS}": context deadline exceeded', SAS),
    "sas escaped": (f"{ACCOUNT}%3Fsv%3D2024%26sig%3D{SAS}", SAS),
    "sas escaped first": (f"{ACCOUNT}%3Fsig%3D{SAS}", SAS),
    "sas upper case": (f"{ACCOUNT}?SV=2024&SIG={SAS}", SAS),
    "sas raw": (f"{ACCOUNT}?sig={S.rstrip('=')}", S.rstrip("=")),
    "sas of a service bus": (f"SharedAccessSignature sr=x&sig={SAS}&se=1&skn=y", SAS),
    "sas in json": (json.dumps({"url": f"{ACCOUNT}?sig={SAS}"}), SAS),
    "sas html": (f"{ACCOUNT}?sp=r&amp;sig={SAS}", SAS),
    "sas token variable": (f"AZURE_STORAGE_SAS_TOKEN=?sv=1&sig={SAS}", SAS),
    # pre-signed URLs
    "s3 signature": (f"{BUCKET}?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Signature={HEX}", HEX),
    "s3 signature first": (f"{BUCKET}?X-Amz-Signature={HEX}&X-Amz-Date=1", HEX),
    "s3 credential": (
        f"{BUCKET}?X-Amz-Credential=AKIA4EXAMPLE7QQ%2F20261122%2Feu%2Fs3%2Faws4_request&a=1",
        "AKIA4EXAMPLE7QQ",
    ),
    "s3 session": (f"{BUCKET}?X-Amz-Security-Token={SAS}&a=1", SAS),
    "s3 escaped": (f"{BUCKET}%3FX-Amz-Signature%3D{HEX}", HEX),
    "s3 version 2": (f"{BUCKET}?AWSAccessKeyId=AKIA4EXAMPLE7QQ&Expires=1&Signature={SAS}", SAS),
    "s3 version 2 id": (f"{BUCKET}?AWSAccessKeyId=AKIA4EXAMPLE7QQ&Expires=1", "AKIA4EXAMPLE7QQ"),
    "gcs": (f"https://storage.googleapis.com/b/o?X-Goog-Signature={HEX}", HEX),
    "gcs credential": ("https://storage.googleapis.com/b/o?X-Goog-Credential=robot%40p.iam&x=1", "robot%40p.iam"),
    "gcs version 2": (f"https://storage.googleapis.com/b/o?GoogleAccessId=robot&Signature={SAS}", SAS),
    "oss": (f"https://b.oss-cn.aliyuncs.com/o?OSSAccessKeyId=LTAI5&Expires=1&Signature={SAS}", SAS),
    "cos": (f"https://b.cos.myqcloud.com/o?q-ak=x&q-signature={HEX}", HEX),
    "in an error of Go": (f'Get "{BUCKET}?X-Amz-Signature={HEX}": dial tcp: i/o timeout', HEX),
    # connection strings, keys and values
    "a name and its value": (json.dumps([{"name": "DB_PASSWORD", "value": "Hunter2Hunter2"}]), "Hunter2Hunter2"),
    "a name and its value escaped": (
        json.dumps(json.dumps({"key": "api-key", "value": "Hunter2Hunter2"})),
        "Hunter2Hunter2",
    ),
    "azure connection string": (
        f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={S};EndpointSuffix=core.windows.net",
        S,
    ),
    "azure connection string with a sas": (f"BlobEndpoint={ACCOUNT};SharedAccessSignature=sv=1&sig={SAS}", SAS),
    "service bus": (f"Endpoint=sb://x/;SharedAccessKeyName=root;SharedAccessKey={S}", S),
    "sql server": ("Server=db,1433;User ID=sa;Password=Hunter2Hunter2;Encrypt=yes", "Hunter2Hunter2"),
    "sql server short": ("Server=db;Uid=sa;Pwd=Hunter2Hunter2;", "Hunter2Hunter2"),
    "libpq": ("host=db user=app password=hunter2 dbname=app", "hunter2"),
    "libpq quoted": ("host=db password='hun ter2' dbname=app", "hun ter2"),
    "aws profile": (f"[default]\naws_access_key_id = AKIA4EXAMPLE7QQ\naws_secret_access_key = {S}\n", S),
    "aws session": (f"aws_session_token={S}", S),
    "aws variable": (f"AWS_SECRET_ACCESS_KEY={S}", S),
    "azure variable": (f"AZURE_STORAGE_KEY={S}", S),
    "azure client secret": ("AZURE_CLIENT_SECRET=abc~Q8xyz.123-_4", "abc~Q8xyz.123-_4"),
    "kopia variable": ("KOPIA_PASSWORD=correct-horse", "correct-horse"),
    "kopia flag": ("kopia repository connect s3 --secret-access-key=abc123 --bucket=b", "abc123"),
    "kopia flag apart": ("kopia repository connect s3 --secret-access-key abc123 --bucket b", "abc123"),
    "kopia password flag": ("kopia repository connect --password correct-horse --x", "correct-horse"),
    "kopia storage key flag": (f"kopia repository create azure --storage-key={S}", S),
    "kopia sas flag": (f"kopia repository create azure --sas-token=sv=1&sig={SAS}", SAS),
    "kubectl literal": ("--from-literal=repository-password=correct-horse", "correct-horse"),
    "query password": ("https://db.example.com/?user=a&password=hunter2&x=1", "hunter2"),
    "api key": ("GET /v1?api_key=0123456789abcdef", "0123456789abcdef"),
    "json password": ('{"user":"a","password":"hunter2"}', "hunter2"),
    "json password spaced": ('{"password" : "hunter 2"}', "hunter 2"),
    "json in json": (json.dumps({"message": '{"clientSecret":"hunter2"}'}), "hunter2"),
    "json key of kopia": ('{"accessKeyID":"AKIA4","secretAccessKey":"abc123","region":""}', "abc123"),
    "json of gcs": (json.dumps({"private_key": f"-----BEGIN PRIVATE KEY-----\n{PEM_BODY}\n"}), PEM_BODY),
    "json refresh token": ('{"refresh_token":"1//0gLongRefresh"}', "1//0gLongRefresh"),
    "json session": ('{"sessionToken":"FwoGZXIvYXdzEBY"}', "FwoGZXIvYXdzEBY"),
    "python dict": ("{'password': 'hunter2'}", "hunter2"),
    "xml of sts": ("<Credentials><SecretAccessKey>abc/123</SecretAccessKey></Credentials>", "abc/123"),
    "xml of sts session": ("<SessionToken>FwoGZXIvYXdzEBY</SessionToken>", "FwoGZXIvYXdzEBY"),
    # PEM blocks
    "pem": (f"-----BEGIN PRIVATE KEY-----\n{PEM_BODY}\n-----END PRIVATE KEY-----", PEM_BODY),
    "pem rsa": (f"x -----BEGIN RSA PRIVATE KEY-----\n{PEM_BODY}\n-----END RSA PRIVATE KEY----- y", PEM_BODY),
    "pem openssh": (f"-----BEGIN OPENSSH PRIVATE KEY-----\n{PEM_BODY}\n-----END OPENSSH PRIVATE KEY-----", PEM_BODY),
    "pem encrypted": (
        f"-----BEGIN ENCRYPTED PRIVATE KEY-----\n{PEM_BODY}\n-----END ENCRYPTED PRIVATE KEY-----",
        PEM_BODY,
    ),
    "pem in one line": (f"-----BEGIN EC PRIVATE KEY-----\\n{PEM_BODY}\\n-----END EC PRIVATE KEY-----\\n", PEM_BODY),
    "pem cut off": (f"cannot parse: -----BEGIN RSA PRIVATE KEY-----\n{PEM_BODY}", PEM_BODY),
    "pem certificate": (f"-----BEGIN CERTIFICATE-----\n{PEM_BODY}\n-----END CERTIFICATE-----", PEM_BODY),
    # tokens
    "bearer": ("Authorization: Bearer abcdef0123456789", "abcdef0123456789"),
    "bearer alone": ("sent with bearer abcdef0123456789", "abcdef0123456789"),
    "bearer of a service account": (f"Bearer {JWT}", JWT),
    "jwt": (f"cannot verify {JWT}: expired", JWT),
    "jwt unsigned": (f"token {JWT.rpartition('.')[0]}.", JWT.split(".")[1]),
    "basic": ("authorization: Basic dXNlcjpodW50ZXIy", "dXNlcjpodW50ZXIy"),
    "basic in json": ('{"Authorization": "Basic dXNlcjpodW50ZXIy"}', "dXNlcjpodW50ZXIy"),
    "signature of aws": (
        f"Authorization: AWS4-HMAC-SHA256 Credential=AKIA4/x, SignedHeaders=host, Signature={HEX}",
        HEX,
    ),
    "signature of aws alone": (f"got AWS4-HMAC-SHA256 Credential=AKIA4/x, SignedHeaders=host, Signature={HEX}", HEX),
    "shared key of azure": (f"Authorization: SharedKey account:{S}", S),
    "oauth of google": ("access ya29.a0AfH6SMBx_abcdefghijklmnopqrs was rejected", "a0AfH6SMBx_abcdefghijklmnopqrs"),
    "token variable": ("VAULT_TOKEN=hvs.CAESIJ", "hvs.CAESIJ"),
    "token of github": (f"cloned with ghp_{'a1B2' * 9}", "a1B2a1B2"),
    # passwords in URLs
    "url": ("https://user:hunter2@example.com/x", "hunter2"),
    "url of a proxy": ("proxyconnect http://proxy-user:p%40ss@proxy:3128: refused", "p%40ss"),
    "url with an at sign": ("HTTPS_PROXY=http://proxy-user:p@ss@proxy:3128", "ss@"),
    "url that is invalid": ('invalid proxy address "http://user:p/ss@proxy:3128": invalid port ":p"', "p/ss"),
    "url of a database": ("postgres://app:hunter2@db:5432/app?sslmode=disable", "hunter2"),
    "url of redis": ("redis://:hunter2@cache:6379/0", "hunter2"),
    "url in quotes": ('Get "https://user:hunter2@example.com/": EOF', "hunter2"),
    "url of git": ("https://ghp_abc123@github.com/a/b", "ghp_abc123"),
    "two urls": ("https://a:hunter2@x and https://b:hunter2@y", "hunter2"),
}

HARMLESS = [
    "/var/lib/kubelet/pods/3f0c1a52-4a57-4c1b-8f0e-9d8a6c5b4e3f/volumes/kubernetes.io~csi/pvc-1/mount",
    "/host_pods/0d9c6a1e-1f2b-4c3d-8e4f-5a6b7c8d9e0f/volumes/kubernetes.io~empty-dir/data",
    "/credentials/cloud, /var/run/secrets/kubernetes.io/serviceaccount/token and /etc/ssl/private/tls.key",
    "cannot read /scratch/password-file: permission denied",
    "open /credentials/key/token.json: no such file or directory",
    "3f0c1a52-4a57-4c1b-8f0e-9d8a6c5b4e3f",
    "image example.com:5000/node-agent@sha256:9f3b1c7e5a2d4f608b7c6d5e4f3a2b1c0d9e8f7a6b5c4d3e2f1a0b9c8d7e6f50",
    "sha256:9f3b1c7e5a2d4f608b7c6d5e4f3a2b1c0d9e8f7a6b5c4d3e2f1a0b9c8d7e6f50",
    "snapshot k8ce4a7f2d1b9e6053c8f7a2d4b1e9c60 of root kd2b1c7e5a2d4f608b7c6d5e4f3a2b1c",
    "config 6a5f8e1c0b7d (git 0123456789abcdef0123456789abcdef01234567)",
    "DataUpload velero/du-1: backup repository velero/app-default-kopia is not ready: wrong password",
    "Secret velero/velero-repo-credentials has no key repository-password",
    "Secret velero/cloud-credentials: key cloud: not a credentials file",
    "the repository password is wrong: the backup repository was created with another one",
    "invalid password: key derivation failed",
    "service account token /var/run/secrets/kubernetes.io/serviceaccount/token: No such file or directory",
    "token: the server has asked for the client to provide credentials",
    "bearer authentication is not supported, basic authentication neither",
    "Bearer token expired",
    "no signature: signals SIGTERM and SIGKILL",
    "sig=9",
    "--password and --secret-access-key are required (see --help)",
    "--password --bucket b",
    "s3://bucket/prefix, https://minio.example.com:9000/bucket@1 and http://[::1]:9000/@",
    "https://account.blob.core.windows.net/container?restype=container&comp=list&prefix=kopia/app/",
    "GET /api/v1/namespaces/velero/secrets/cloud-credentials: 404 NotFound",
    "GET /api/v1/namespaces/velero/events?fieldSelector=involvedObject.uid%3D3f0c1a52-4a57-4c1b-8f0e-9d8a6c5b4e3f",
    "ssh://git@github.com/a/b and user@example.com",
    "node node-a:10250@zone is not Ready",
    "label nodeagent.io/owner-uid=3f0c1a52-4a57-4c1b-8f0e-9d8a6c5b4e3f",
    "secret=velero/cloud-credentials",
    "AWS access key ID AKIA4EXAMPLE7QQ does not exist",
    '{"snapshotID":"k8ce4a7f2d1b9e6053c8f7a2d4b1e9c60","source":{"byPath":"/3f0c1a52"},"totalBytes":1000}',
    '{"totalBytes":107374182400,"doneBytes":53687091200,"bytesPerSecond":104857600}',
    'nodeagent_queue_position{kind="DataUpload",name="token-1",node="node-a"} 1.0',
    "monkey = banana; keyword = x; tokens = 5 of 10; author: me",
    "compressed with zstd-fastest, encrypted with AES256-GCM-HMAC-SHA256, hash BLAKE2B-256-128",
    "2026-11-22T13:01:15.123Z",
    "keyboard: interrupt",
    "",
]

TYPICAL = (
    "DataUpload velero/backup-20261122-x7k2p: data mover pod is on node ip-10-0-1-23, waiting for a slot (2 of 2 used)"
)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_redacted(name: str) -> None:
    text, secret = SECRETS[name]
    assert secret in text
    for variant in (text, f"attempt 3 of 5: {text}: gave up", text + "\n" + text):
        redacted = redact(variant)
        assert secret not in redacted
        assert "***" in redacted
        assert redact(redacted) == redacted


@pytest.mark.parametrize("text", HARMLESS)
def test_a_harmless_text_is_unchanged(text: str) -> None:
    assert redact(text) == text


def test_what_explains_an_error_is_kept() -> None:
    for at in range(len(S)):
        # Wherever the first character is that a URL escapes.
        text = f'Put "{ACCOUNT}?sp=racw&sig={quote(S[at:] + S[:at], safe="")}&se=2026": context deadline exceeded'
        assert redact(text) == f'Put "{ACCOUNT}?sp=racw&sig=***&se=2026": context deadline exceeded'
    assert redact("GET https://a.test/b?sig=0123456789abc: 403") == "GET https://a.test/b?sig=***: 403"
    assert redact("Pwd=hunter2: refused. Password=hunter2.") == "Pwd=***: refused. Password=***."
    assert redact("dial https://user:hunter2@minio:9000/b: refused") == "dial https://user:***@minio:9000/b: refused"


@pytest.mark.parametrize(
    "written",
    ["p/ss w+rd€!", "p%2Fss%20w%2Brd%E2%82%AC%21", "p%2Fss+w%2Brd%E2%82%AC%21", "cC9zcyB3K3Jk4oKsIQ==", '\\u20ac!"'],
    ids=["plain", "in a URL", "in a form", "base64", "json"],
)
def test_a_known_value_is_redacted_in_every_encoding(written: str) -> None:
    redactor = Redactor(["p/ss w+rd€!"])
    text = written if written[0] != "\\" else json.dumps("p/ss w+rd€!")
    assert redactor.redact(f"kopia: {text} is wrong").replace('"', "") == "kopia: *** is wrong"


def test_a_value_that_contains_another_is_redacted_as_a_whole() -> None:
    redactor = Redactor(["secret-one"])
    redactor.add("secret-one-and-more", "abc")
    assert redactor.redact("secret-one-and-more secret-one abc") == "*** *** abc"


def test_a_typical_line_is_cheap() -> None:
    """The limit is wide for busy machines; the docstring has the measurement."""
    began = time.process_time()
    for _ in range(2000):
        redact(TYPICAL)
    assert (time.process_time() - began) / 2000 < 50e-6


@pytest.mark.parametrize("piece", ["-----BEGIN A-----", "password", "://a:", "sig=", "Bearer 1", "eyJ", "key" * 9, "x"])
def test_a_long_text_takes_time_in_proportion(piece: str) -> None:
    text = re.sub(r"\s", "", piece) * (100_000 // len(piece)) + "password token key sig= :// eyj bearer"
    began = time.process_time()
    redact(text)
    assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("user: a\npassword: hunter2 # note\nb: c", "user: a\npassword: ***\nb: c"),
        ("s3:\n  - apiToken: 'hunter2'\n", "s3:\n  - apiToken: ***\n"),
        ("x: {user: a, password: hunter2, b: c}", "x: {user: a, password: ***, b: c}"),
        ('{"password": 4711, "b": 1}', '{"password": ***, "b": 1}'),
        ("key:\n  token: |\n    hunter2\n    more\n  b: c", "key:\n  token: | ***\n  b: c"),
        ('args: ["--password", "hunter2", "--x"]', 'args: ["--password", "***", "--x"]'),
        ("args:\n- --password\n- hunter2\n- --x", "args:\n- --password\n- ***\n- --x"),
        ("invalid token: unexpected end", "invalid token: unexpected end"),
        ("tokenFile: /run/t\nsecretName: s", "tokenFile: /run/t\nsecretName: s"),
    ],
)
def test_a_secret_in_yaml_is_redacted_without_quotes(text: str, redacted: str) -> None:
    assert redact_lines(text) == redacted


def test_a_value_is_redacted_whose_key_or_flag_is_apart_from_it() -> None:
    document = {"password": "hunter2", "a": [{"apiKey": 7, "token": ""}], "b": ["--token", "hunter2", "x"]}
    shown = {"password": "***", "a": [{"apiKey": "***", "token": ""}], "b": ["--token", "***", "x"]}
    assert redact_values(document) == shown
    kept = {"automountToken": True, "tokens": 3, "b": ["--password", "--x", "y"], "key": "z", "myToken": {"a": "b"}}
    assert redact_values(kept) == kept


@pytest.mark.parametrize(
    "text",
    [
        "env:\n  - name: DB_PASSWORD\n    value: Hunter2Hunter2\n",
        'env:\n  - name: "DB_PASSWORD"\n    value: "Hunter2Hunter2"\n',
        "env: [{name: DB_PASSWORD, value: Hunter2Hunter2}]\n",
    ],
    ids=["block", "quoted", "flow"],
)
def test_the_value_beside_a_name_is_found_in_yaml(text: str) -> None:
    assert "Hunter2" not in redact_lines(text)
    harmless = text.replace("DB_PASSWORD", "DB_HOST")
    assert redact_lines(harmless) == harmless


@pytest.mark.parametrize("name", ["name", "key"])
def test_the_value_beside_a_name_is_found_in_a_document(name: str) -> None:
    pair = {"value": "plain", name: "password"}
    assert redact_values({"env": [pair, {name: "host", "value": "plain"}]}) == {
        "env": [pair | {"value": "***"}, {name: "host", "value": "plain"}]
    }
