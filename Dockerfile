# The image of both programs: the node agent and the data mover.
#
#   docker build .                       uses Python's image as base, and compiles kopia in a separate stage
#   tools/image.sh                       builds the same without an image registry (see docs/development.md)
#
# Build arguments:
#   BASE      image with python3 (3.11 or later, with venv), certificates and util-linux
#   GO        image with the Go compiler, for KOPIA=built
#   KOPIA     "built", or "ready": use the binary image-parts/kopia of the build context
#   PACKAGES  "index", or "ready": use the Python packages in image-parts/wheels of the build context
#
# tools/digests.py renews the digests, which are those of all architectures.
ARG BASE=docker.io/library/python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b
ARG GO=docker.io/library/golang:1.26-bookworm@sha256:9fdc884aacc3bec89b20ffc69f4bb369c78210e3e4f600387b5128b12c199f81
ARG KOPIA=built
ARG PACKAGES=index

FROM ${GO} AS kopia-built
WORKDIR /source
COPY tools/kopia/ ./
RUN CGO_ENABLED=0 go build -mod=readonly -trimpath \
      -tags "$(sed -n 's/^tags //p' build.conf)" \
      -ldflags "-s -w $(sed -n 's/^ldflags //p' build.conf | tr '\n' ' ')" \
      -o /kopia github.com/kopia/kopia

FROM scratch AS kopia-ready
COPY image-parts/kopia /kopia

FROM kopia-${KOPIA} AS kopia

FROM ${BASE} AS packages-index
RUN mkdir /wheels
ENV PIP_OPTIONS=""

FROM ${BASE} AS packages-ready
COPY image-parts/wheels /wheels
ENV PIP_OPTIONS="--no-index --find-links=/wheels"

# All layers that do not depend on the sources. -OO writes .opt-2.pyc files: without docstrings the processes need less
# memory, and a read-only container could not write the files later. "unchecked-hash" never compares them with the sources.
FROM packages-${PACKAGES} AS packages
COPY requirements.txt /
RUN python3 -m venv --without-pip /opt/venv && \
    python3 -m venv /tmp/pip && \
    /tmp/pip/bin/pip --python /opt/venv/bin/python install --no-compile --no-cache-dir --disable-pip-version-check \
      --require-hashes --only-binary :all: $PIP_OPTIONS --requirement /requirements.txt && \
    rm -r /tmp/pip && \
    /opt/venv/bin/python -OO -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/venv

FROM ${BASE}
# The standard library of the base image, compiled again with -OO.
RUN library="$(python3 -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')" && \
    find "$library" -name '*.pyc' -delete && \
    python3 -OO -m compileall -q -j 0 --invalidation-mode unchecked-hash \
      -x '/(site-packages|dist-packages|test|tests|lib2to3|idlelib|ensurepip)/' "$library"
COPY --from=kopia /kopia /usr/local/bin/kopia
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    PYTHONPATH=/opt/node-agent \
    PYTHONOPTIMIZE=2 \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    KOPIA_CHECK_FOR_UPDATES=false
WORKDIR /
# The command of Velero's DaemonSets, `/velero node-agent server …`: they run this image unchanged.
RUN printf '#!/bin/sh\nexec /opt/venv/bin/python -m nodeagent "$@"\n' >/velero && chmod 755 /velero
# The command of the init container that Velero adds to restored pods. The options keep it small: no site packages, no
# environment, unbuffered, and the modules as they were compiled above.
RUN printf '#!/bin/sh\nexec /opt/venv/bin/python -ISuOO /opt/node-agent/datamover/restore_helper.py "$@"\n' \
      >/velero-restore-helper && chmod 755 /velero-restore-helper
# No entry point: pods specify the whole command, `python -m nodeagent …` or `python -m datamover …`.
CMD ["python", "-m", "nodeagent", "serve"]
COPY core/ /opt/node-agent/core/
COPY exposer/ /opt/node-agent/exposer/
COPY nodeagent/ /opt/node-agent/nodeagent/
COPY datamover/ /opt/node-agent/datamover/
RUN python -OO -m compileall -q -j 0 --invalidation-mode unchecked-hash /opt/node-agent
# By number, as a kubelet cannot tell from a name whether it is root (runAsNonRoot). Mover pods and Velero's DaemonSet set
# another user: root.
USER 65532:65532
