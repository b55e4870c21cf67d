# Every target does the set-up that it needs, once.
#
# Variables: PYTHON (python3), NODE_AGENT_CACHE (~/.cache/node-agent: built tools, the virtual environment, images),
# TESTS (arguments for pytest, such as TESTS="-k queue"), CI (true: a tier that cannot run is a failure), SECONDS and SEED
# (of soak; fuzz has EXAMPLES and SEED, retention-machine STEPS and SEED), PREVIOUS (the revision that crash-matrix and test-upgrade mix with this one, default: see tools/previous.sh),
# BENCH (arguments for the measurements, such as BENCH=--quick), DEBIAN and COMMAND (of setup-from-nothing),
# and those of images, which are Velero's: BUILD_ARCH, BUILD_OS, BUILD_OUTPUT_TYPE, VERSION, REGISTRY and others (docs/images.md), and
# TAG (of release-check).

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
ifndef SIDE_BY_SIDE
.NOTPARALLEL:
endif

PYTHON ?= python3
TESTS ?=
PREVIOUS ?=
export PYTHON PREVIOUS
# Else each of the thousands of processes that tests start compiles all that it imports.
export PYTHONDONTWRITEBYTECODE :=

venv = $$(tools/venv.sh)/bin
pytest = $(venv)/python -m pytest -q $(TESTS)
# To collect all others takes longer than some of the tests.
integration_folders = tests/crash tests/deploy tests/integration
# Many tests wait for a clock or a process: one worker more than cores keeps the cores busy. The slow ones stand together:
# a worker that has no more tests takes some of those that wait for another.
parallel = -n $$(($$(nproc) + 1)) --dist worksteal
no_cluster = not integration and not cluster and not slow and not thorough
step = @printf '\n== %s\n' "$@"
is_root := $(filter 0,$(shell id -u))

.PHONY: help
help: ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# -- demonstration ----------------------------------------------------------------------------------------------------
.PHONY: demo screenshots cluster
demo: bed ## back up and restore a volume in a real cluster (root)
	$(step)
	@$(venv)/python -m tests.testbed demo

cluster: bed ## open a shell in a running cluster, with kubectl and examples/ (root)
	$(step)
	@$(venv)/python -m tests.testbed shell

screenshots: venv ## draw the pictures of the documentation
	$(step)
	@UPDATE_GOLDEN=1 $(pytest) tests/docs/test_screenshots.py tests/docs/test_page_pictures.py

# -- tests ------------------------------------------------------------------------------------------------------------
.PHONY: check coverage test test-slow lint format types contracts unit integration cluster-test
.PHONY: attack-matrix crash-matrix crash-matrix-skew test-chart test-recovery test-cluster-full test-upgrade test-velero test-kubernetes test-images soak fuzz retention-machine test-mover-full
# Tests on a kubelet and on an API server mostly wait. Unit tests would take the time from them within which pods must move data.
test: lint types contracts $(if $(is_root),setup,integration-tools) ## run all checks below
	@times="$$(mktemp)"; trap 'rm -f "$$times"' EXIT; export TEST_TIMES="$$times"; failed=0; \
	$(MAKE) --no-print-directory unit || failed=$$?; \
	$(side_by_side) --keep-going integration cluster-test || failed=$$?; \
	$(venv)/python -m tests.support.tiers "$$times"; [ "$$failed" = 0 ] || exit "$$failed"; \
	printf '\nAll checks passed.\n'

test-slow: setup ## what make test leaves out: further rows of matrices, real time-outs, tests of tools; under 90 minutes (root)
	$(step)
	@$(pytest) -m 'thorough and not integration and not cluster and not slow' $(parallel) --durations 25 --durations-min 5
	@MOVER_TESTS_BACKUP=plain $(pytest) -m 'not slow' $(parallel) tests/datamover/flows
	@$(pytest) -m 'thorough and integration and not slow' $(parallel) --durations 15 --durations-min 5
	@$(venv)/python -m tests.testbed --nodes 2 run -- $(venv)/python -m tests.cluster --thorough -q $(TESTS)

check: lint types contracts ## the quick loop: static checks and the tests that start no process; 2 minutes
	$(step)
	@$(pytest) -m '$(no_cluster) and not processes' $(parallel) --durations 15 --durations-min 0.5

coverage: venv unit-tools ## statement and branch coverage of the unit tests, and the modules below 90 %
	$(step)
	@rm -f .coverage .coverage.*
	@$(pytest) -m '$(no_cluster)' $(parallel) --cov --cov-report=
	@$(venv)/coverage report | awk 'NR < 3 || /^TOTAL/ || $$NF + 0 < 90'

lint: venv ## style (ruff)
	$(step)
	@$(venv)/ruff check
	@$(venv)/ruff format --check

format: venv ## format the sources
	@$(venv)/ruff check --fix --exit-zero
	@$(venv)/ruff format

types: venv ## types (mypy)
	$(step)
	@MYPY_CACHE_DIR="$${NODE_AGENT_CACHE:-$$HOME/.cache/node-agent}/mypy" $(venv)/mypy

contracts: venv ## import rules (import-linter)
	$(step)
	@$(venv)/lint-imports --no-logo

unit: venv unit-tools ## unit tests, with a real kopia
	$(step)
	@TIER=$@ $(pytest) -m '$(no_cluster)' $(parallel) --durations 25 --durations-min 5

integration: venv integration-tools ## tests against a real kube-apiserver
	$(step)
	@TIER=$@ $(pytest) $(if $(filter tests/%,$(TESTS)),,$(integration_folders)) -m 'integration and not slow and not thorough' $(parallel) --durations 15 --durations-min 5

cluster-test: ## tests on a real kubelet (root; skipped without, unless CI=true)
	$(step)
ifneq ($(is_root),)
	@$(MAKE) --no-print-directory setup
	@TIER=$@ $(venv)/python -m tests.testbed --nodes 2 run -- $(venv)/python -m tests.cluster -q $(TESTS)
else
	@if [ "$${CI:-}" = true ]; then echo 'error: tests on a real kubelet need root, and CI=true lets no tier be skipped' >&2; exit 1; fi
	@echo 'skipped: tests on a real kubelet need root'
endif

attack-matrix: venv unit-tools ## exchange directories for links during backups and restores, by each means of confinement and without (root)
	$(step)
	@ATTACK_ROUNDS=20 $(pytest) --timeout=1800 -p tests.datamover.support.attack_matrix tests/datamover/flows/test_confinement.py

crash-matrix: venv integration-tools ## stop the agent at every write, fail every write, against a real kube-apiserver
	$(step)
	@$(pytest) -m slow tests/crash

crash-matrix-skew: venv integration-tools ## the part of crash-matrix that mixes agents of this and of the PREVIOUS version
	$(step)
	@$(pytest) -m slow tests/crash/test_version_skew.py

test-chart: setup ## the Helm chart with Helm 3 and Helm 4, which it builds: on an API server, and in a cluster that has nothing yet (root)
	$(step)
	@tools/build.sh helm helm4 >/dev/null
	@$(pytest) tests/deploy/test_chart.py tests/integration/test_chart.py
	@$(venv)/python -m tests.testbed run -- $(pytest) tests/cluster/test_fresh_chart.py

test-recovery: bed ## back volumes up in one cluster, and restore them in another one that has only the bucket (root)
	$(step)
	@folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; for part in first then; do \
	  RECOVERY_FOLDER=$$folder $(venv)/python -m tests.testbed run -- $(pytest) tests/cluster/test_two_clusters.py -k test_$$part || exit; \
	done

test-cluster-full: bed ## kill components while data moves, and fire alerts, on a real kubelet; half an hour (root)
	$(step)
	@tools/build.sh prometheus prometheus >/dev/null
	@$(venv)/python -m tests.testbed --nodes 2 run -- $(pytest) -m slow tests/cluster_full

# The last commit before the commands moved out of the agent's package. To be removed once a release is tagged.
before_the_move = 5f80fa75907e0df1ee27cab0266a8633e0690825

test-upgrade: bed ## update agents from the PREVIOUS version and back while data moves, and mix commands and agents (root)
	$(step)
	@export PREVIOUS="$${PREVIOUS:-$(before_the_move)}"; tools/previous.sh --image >/dev/null; \
	$(venv)/python -m tests.testbed --nodes 2 run -- $(pytest) -m slow tests/upgrade

test-velero: bed integration-tools ## beside the data movers, agents and servers of Velero 1.17 and 1.18, which it builds; an hour (root)
	$(step)
	@for name in velero-1.17.2 velero-1.18.3 velero-plugin-for-aws; do tools/build.sh "$$name" >/dev/null; done
	@# Velero's server listens on every address, so all of it has a network namespace of its own.
	@unshare --net sh -euc 'ip link set lo up; exec "$$@"' sh $(pytest) -m slow tests/datamover/velero tests/velero
	@$(venv)/python -m tests.testbed run -- $(pytest) -m slow tests/velero_cluster

test-kubernetes: venv api-tools ## transfers of each kind while definitions are updated and downgraded, on the API servers of Kubernetes 1.31 and 1.37, which it builds; minutes
	$(step)
	@for name in kubernetes-1.31 kubernetes-1.37; do \
	  tools/build.sh "$$name" >/dev/null; KUBERNETES=$$name $(pytest) tests/crash/test_definitions_matrix.py || exit; \
	done

test-images: setup ## build the images of all architectures, start their programs under QEMU, push them to a registry; minutes (root)
	$(step)
	@$(pytest) -m slow tests/image

SECONDS ?= 1200
SEED ?=
soak: bed ## transfers and faults at random for SECONDS (1200), by SEED if given (root)
	$(step)
	@$(venv)/python -m tests.testbed --nodes 2 run -- $(venv)/python -m tests.soak --seconds $(SECONDS) $(if $(SEED),--seed $(SEED))

EXAMPLES ?= 100000
fuzz: venv ## EXAMPLES (100000) malformed objects and answers, by SEED if given; nothing may stop the agent; an hour
	$(step)
	@$(venv)/python -m tests.fuzz --examples $(EXAMPLES) $(if $(SEED),--seed $(SEED))

STEPS ?= 10000
retention-machine: venv ## backups, losses, clock errors, kills and commands at random for STEPS (10000), by SEED if given; minutes
	$(step)
	@$(venv)/python -m tests.retention --steps $(STEPS) $(if $(SEED),--seed $(SEED))

test-mover-full: venv unit-tools ## more random trees, kills, drains and storage outages for the data mover; half an hour
	$(step)
	@MOVER_TESTS=full $(pytest) -s tests/datamover/flows/test_{random_trees,kill,in_place_kill,drain,outage,opening,index_blobs}.py

# -- measurements -----------------------------------------------------------------------------------------------------
.PHONY: bench-mover
bench-mover: root venv mover-tools ## cost of the data mover compared with kopia alone; 15 minutes (root)
	$(step)
	@$(venv)/python -m benchmarks.bench_mover $(BENCH)

.PHONY: bench-life
bench-life: bed ## the stages of transfers of all kinds on a real kubelet, beside kopia by hand; 20 minutes (root)
	$(step)
	@$(venv)/python -m tests.testbed run -- $(venv)/python -m benchmarks.bench_life $(BENCH)

.PHONY: bench-cli
bench-cli: venv api-tools ## cost of nodeagent status and volumes with 10,000 transfers and 5,000 PVCs; 5 minutes
	$(step)
	@$(venv)/python -m benchmarks.bench_cli $(BENCH)

.PHONY: bench-ui
bench-ui: venv api-tools ## how soon the pages of nodeagent ui are there with 10,000 transfers and 5,000 PVCs, and what they cost; 8 minutes
	$(step)
	@$(venv)/python -m benchmarks.bench_ui $(BENCH)

.PHONY: bench-resume
bench-resume: root venv mover-tools ## what an interruption of a transfer costs; 13 minutes (root)
	$(step)
	@$(venv)/python -m benchmarks.bench_resume $(BENCH)

.PHONY: bench-scale
bench-scale: venv api-tools ## cost of many agents and transfers; 25 minutes
	$(step)
	@$(venv)/python -m benchmarks.bench_scale $(BENCH)

.PHONY: bench-peers
bench-peers: root venv mover-tools api-tools ## backups and restores beside Velero, kopia, restic and rustic; hours; needs Rust (root)
	$(step)
	@tools/cargo.sh rustic >/dev/null; tools/build.sh restic >/dev/null; tools/build.sh velero-1.18.3 velero >/dev/null
	@$(venv)/python -m benchmarks.bench_peers $(BENCH)

.PHONY: house
house: venv ## print the sizes of the product: lines, modules, names, words
	@$(venv)/python -m tools.house

# -- release ----------------------------------------------------------------------------------------------------------
.PHONY: release-check
release-check: venv ## build wheel, source archive and chart into _output/, and try them out; TAG (v0.1.0): as for that tag
	$(step)
	@$(venv)/python -m tools.release check $(TAG)

# -- set-up -----------------------------------------------------------------------------------------------------------
.PHONY: manifests schemas setup bed setup-from-nothing root packages venv image images sbom lock lock-images vendor clean
.PHONY: mover-tools api-tools bed-tools unit-tools integration-tools tools
setup: root venv ## do all set-up: packages, Python, Go tools, image (root)
	+@$(side_by_side) image tools

bed: root venv ## do the set-up for the demonstration and the test bed, without what only tests need (root)
	+@$(side_by_side) image bed-tools

# One part waits for a network or a disk while another computes.
side_by_side = $(MAKE) --no-print-directory $(if $(SIDE_BY_SIDE),,-j 2) SIDE_BY_SIDE=yes

root:
ifeq ($(is_root),)
	@echo 'error: root is needed to install Debian packages and to start a kubelet in namespaces' >&2; exit 1
endif

packages: ## install missing Debian packages (root)
	@tools/packages.sh

# As root the packages come first: Debian's Python needs one of them to create virtual environments.
venv: $(if $(is_root),packages) ## create the Python environment for development
	@tools/venv.sh >/dev/null

mover-tools:
	@tools/build.sh kopia kopia >/dev/null
	@tools/build.sh versitygw >/dev/null

api-tools:
	@tools/build.sh etcd >/dev/null
	@tools/build.sh kubernetes kube-apiserver kubectl >/dev/null

bed-tools: mover-tools
	@tools/build.sh etcd >/dev/null
	@tools/build.sh kubernetes >/dev/null
	@tools/build.sh csi >/dev/null

# Those that share packages come one after the other.
unit-tools: mover-tools
	@tools/build.sh kopia index-blobs kopia-testing >/dev/null
	@tools/build.sh foldfs >/dev/null
	@tools/build.sh fake-gcs-server >/dev/null
	@tools/npm.sh azurite >/dev/null
	@tools/build.sh helm helm helm-unittest kubeconform >/dev/null
	@tools/build.sh prometheus promtool >/dev/null
	@tools/build.sh actionlint >/dev/null

integration-tools: unit-tools api-tools

tools: bed-tools unit-tools ## build all programs that tests run: kopia, Kubernetes, etcd, servers of storages, checkers

image: $(if $(is_root),packages) ## build the image node-agent:dev, an archive in the cache (root)
	@tools/image.sh

images: $(if $(is_root),packages) venv ## build the images of BUILD_ARCH (amd64,arm64) and their manifest list, into _output/ (root)
	@tools/images.sh

sbom: $(if $(is_root),packages) venv ## write what the images of BUILD_ARCH consist of (CycloneDX), into _output/ (root)
	@tools/sbom.sh

DEBIAN ?= trixie
COMMAND ?= make demo test
setup-from-nothing: root packages ## run COMMAND (make demo test) in a minimal new DEBIAN (trixie), an hour or more (root)
	$(step)
	@tools/try-setup.sh $(DEBIAN) $(COMMAND)

schemas: venv ## write the schemas of Kubernetes that manifests are validated against
	@$(venv)/python tools/schemas.py

manifests: venv ## write deploy/ from the builders of the installer
	@$(venv)/python -m tools.manifests

lock: ## pin the newest versions that pyproject.toml allows
	@tools/lock.sh --upgrade

vendor: venv ## copy the newest locked scripts and styles of the pages into client/ui/static/vendor
	@$(venv)/python -m tools.vendor "$$(tools/npm.sh pages)"

lock-images: ## pin the base images of the Dockerfiles to the digests that their tags have now
	@"$(PYTHON)" tools/digests.py

clean: ## delete everything that was built, here and in the cache
	@tools/clean.sh
