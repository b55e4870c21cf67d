# The image of all programs: node agent, data mover, restore helper.
#
#   docker build .                       uses Python's image as base, and compiles kopia in a separate stage
#   tools/image.sh                       builds the same without an image registry (see docs/images.md)
#
# All commands run on the machine that builds; into an image of another architecture, files are only copied.
#
# Build arguments:
#   BASE        image with python3, certificates, util-linux and e2fsprogs (debugfs), for the architecture of the image
#   BUILD_BASE  the same Python with venv, for the machine that builds
#   LIBRARY     directory of Python's standard library in both
#   GO          image with the Go compiler, for KOPIA=built
#   KOPIA       "built", or "ready": use the binary image-parts/kopia of the build context
#   PACKAGES    "index", or "ready": use the Python packages in image-parts/wheels of the build context
#
# tools/digests.py renews the digests, which are those of all architectures.
ARG BASE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG GO=docker.io/library/golang:1.26-bookworm@sha256:9fdc884aacc3bec89b20ffc69f4bb369c78210e3e4f600387b5128b12c199f81
ARG BUILD_BASE=${BASE}
ARG KOPIA=built
ARG PACKAGES=index

FROM --platform=$BUILDPLATFORM ${GO} AS kopia-built
ARG TARGETARCH
WORKDIR /source
COPY tools/kopia/ ./
RUN CGO_ENABLED=0 GOARCH=${TARGETARCH} go build -mod=readonly -trimpath \
      -tags "$(sed -n 's/^tags //p' build.conf)" \
      -ldflags "-s -w $(sed -n 's/^ldflags //p' build.conf | tr '\n' ' ')" \
      -o /kopia ./program

FROM scratch AS kopia-ready
COPY image-parts/kopia /kopia

FROM kopia-${KOPIA} AS kopia

FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS packages-index
RUN mkdir /wheels
ENV PIP_OPTIONS=""

FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS packages-ready
COPY image-parts/wheels /wheels
ENV PIP_OPTIONS="--no-index --find-links=/wheels"

# -OO writes .opt-2.pyc files: without docstrings the processes need less memory, and a read-only container could not write
# the files later. "unchecked-hash" never compares them with the sources. wheels.txt is for the bill of materials (tools/sbom.py).
FROM packages-${PACKAGES} AS packages
ARG TARGETARCH
COPY requirements.txt tools/wheel-tags.sh /
RUN python3 -m venv --without-pip /opt/venv && \
    python3 -m venv /tmp/pip && \
    site="$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
    version="$(python3 -c 'import sys; print(*sys.version_info[:2], sep=".")')" && \
    /tmp/pip/bin/pip install --no-compile --no-cache-dir --disable-pip-version-check --require-hashes \
      --only-binary :all: --target "$site" $(sh /wheel-tags.sh "$version" "$TARGETARCH") $PIP_OPTIONS \
      --requirement /requirements.txt --report /tmp/report.json && \
    python3 -c 'import json; [print(each["download_info"]["archive_info"]["hash"].replace("=", ":"), \
      each["metadata"]["name"], each["metadata"]["version"]) for each in json.load(open("/tmp/report.json"))["install"]]' \
      >/opt/venv/wheels.txt && \
    rm -rf /tmp/pip /tmp/report.json "$site/bin" && \
    python3 -OO -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv

FROM ${BASE} AS base

# The standard library of the base, compiled with -OO. Nothing but the result is copied.
FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS library
ARG LIBRARY=/usr/local/lib/python3.11
COPY --from=base ${LIBRARY} /base${LIBRARY}
RUN find "/base$LIBRARY" -name '*.pyc' -delete && \
    python3 -OO -m compileall -q -j 0 --invalidation-mode unchecked-hash -s /base -p / \
      -x '/(site-packages|dist-packages|test|tests|lib2to3|idlelib|ensurepip)/' "/base$LIBRARY" && \
    find "/base$LIBRARY" '(' -type f -o -type l ')' ! -name '*.opt-2.pyc' -delete && \
    find "/base$LIBRARY" -type d -empty -delete

FROM --platform=$BUILDPLATFORM ${BUILD_BASE} AS programs
# The command of Velero's DaemonSets, `/velero node-agent server …`: they run this image unchanged. And that of the data
# movers that Velero's agents create from it: `/velero data-mover backup …`, `/velero pod-volume restore …`.
RUN printf '%s\n' '#!/bin/sh' \
      'case "$1" in data-mover | pod-volume) shift && exec /opt/venv/bin/python -m datamover "$@" ;; esac' \
      'exec /opt/venv/bin/python -m nodeagent "$@"' >/velero && chmod 755 /velero
# The command of the init container that Velero adds to restored pods. The options keep it small: no site packages, no
# environment, unbuffered, and the modules as they were compiled above.
RUN printf '#!/bin/sh\nexec /opt/venv/bin/python -ISuOO /opt/node-agent/datamover/restore_helper.py "$@"\n' \
      >/velero-restore-helper && chmod 755 /velero-restore-helper
COPY core/ /opt/node-agent/core/
COPY exposer/ /opt/node-agent/exposer/
COPY nodeagent/ /opt/node-agent/nodeagent/
COPY client/ /opt/node-agent/client/
COPY datamover/ /opt/node-agent/datamover/
RUN python3 -OO -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/node-agent

FROM base
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/node-agent \
    PYTHONOPTIMIZE=2 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    KOPIA_CHECK_FOR_UPDATES=false
WORKDIR /
# No entry point: pods specify the whole command, `python -m nodeagent …` or `python -m datamover …`.
CMD ["python", "-m", "nodeagent", "serve"]
COPY --from=library /base/ /
COPY --from=kopia /kopia /usr/local/bin/kopia
COPY --from=packages /opt/venv /opt/venv
COPY --from=programs /velero /velero-restore-helper /
COPY --from=programs /opt/node-agent /opt/node-agent
# By number, as a kubelet cannot tell from a name whether it is root (runAsNonRoot). Mover pods and Velero's DaemonSet set
# another user: root.
USER 65532:65532
