package serverctl

import "fmt"

// The verdicts say what the tuner does about a failure, and what a user can do. A remedy is listed only if it is known
// to help, because a wrong remedy costs the user a day. An empty remedy means that none is known.
var (
	classVerdicts = map[Class]struct {
		pointsFault bool // the failure shows that the point (the server's flags) is infeasible; otherwise the failure tells the search nothing
		retryable   bool // a fresh server with the same flags may work
		fatal       bool // the user must act: other flags or a second try do not help
		remedy      string
	}{
		FlagsRejected:      {pointsFault: true}, // no remedy, because argparse and pydantic say what is wrong
		OOMStart:           {pointsFault: true},
		KVTooSmall:         {pointsFault: true},
		StartCrash:         {pointsFault: true},
		OOMLoad:            {pointsFault: true},
		CrashLoad:          {pointsFault: true},
		Hang:               {pointsFault: true, retryable: true},
		StartTimeout:       {pointsFault: true, retryable: true, remedy: "raise server.start_timeout if the server was still working"},
		PortTaken:          {},
		ModelNotFound:      {fatal: true, remedy: "set server.model to a folder with config.json and the weights, or to a name on the hub"},
		Infrastructure:     {retryable: true},
		Aborted:            {},
		AcceptanceNearZero: {},
		DroppedByRace:      {},
		ClientLimited:      {retryable: true, remedy: "give the tuner cores that the server does not use: its load generator was late"},
	}

	causeVerdicts = map[Cause]struct {
		fatal   bool // the user must act: other flags or a second try do not help
		machine bool // a second failure with this cause shows that the machine must be repaired first
		remedy  string
	}{
		EngineDead:    {}, // no remedy, because the evidence says why the engine died
		ExitZero:      {remedy: "see `tuner logs` for what ended the server; its flags are not the cause"},
		IllegalAccess: {}, // a bug of a GPU kernel: the search avoids the point
		NCCL:          {remedy: "run the server with NCCL_DEBUG=INFO in server.env; the usual reasons are a small /dev/shm and broken links between GPUs"},
		DiskFull:      {fatal: true, remedy: "make room on the disk that the line names, or in /dev/shm"},
		TooManyFiles:  {fatal: true, remedy: "raise the limit of open files (ulimit -n)"},
		TooManyProc:   {fatal: true, remedy: "raise the limit of processes (ulimit -u, or the cgroup's pids.max)"},
		GatedModel:    {fatal: true, remedy: "request access to the model, and set HF_TOKEN in server.env"},
		Profiling:     {remedy: "let no other process use the GPU while a server starts"},
		SlowDisk:      {remedy: "raise server.start_timeout, or set server.model_copy"},
		OthersMemory:  {remedy: "find the process that holds the GPU's memory with nvidia-smi, and end it"},
		NoToken:       {},
		Deaf:          {},
		NotDrained:    {},
		Terminated:    {remedy: "find out who ends the server: a person, a job scheduler, a service manager"},
		Killed:        {remedy: "find out who kills the server's processes; the kernel's log (dmesg) names those that the kernel killed"},
		HostOOM:       {remedy: "give the machine more memory, or raise the container's memory limit"},
		Segfault:      {}, // a bug of native code: the search avoids the point
		BusError:      {remedy: "check whether /dev/shm is full, and whether the disk with the weights is readable"},
		Driver:        {machine: true, remedy: "check that nvidia-smi, or rocm-smi, works where the server runs: GPU, driver, and CUDA or ROCm must match"},
		Command:       {fatal: true, remedy: "correct server.command: run it by hand to see what it lacks"},
		Compiler:      {remedy: "install the compiler that the line names (gcc, nvcc, ninja) with its headers, where the server runs"},
		NotAllowed:    {fatal: true, remedy: "let this user read or write what the line names"},
		DiskError:     {remedy: "check the disk, or the NFS server, that holds the file"},
		Hub:           {remedy: "download the model first and set server.model to its folder, or let the machine reach the hub"},
		Damaged:       {remedy: "download the model's weights again: a file is truncated or damaged"},
		RemoteCode:    {remedy: "if you trust the model's code, add --trust-remote-code to server.args"},
		Unsupported:   {remedy: "use a version of vLLM that knows this model's architecture"},
		SameWords:     {remedy: "find the cause with `tuner logs`, correct it, then run the study again: nothing is lost"},
	}
)

// PointsFault reports whether the failure shows that the point is infeasible. Any other failure tells the search
// nothing.
func (c Class) PointsFault() bool { return classVerdicts[c].pointsFault }

// Retryable reports whether a fresh server with the same flags may work.
func (c Class) Retryable() bool { return classVerdicts[c].retryable }

// Machine reports whether the machine must be repaired when a second server has failed with this cause.
func (c Cause) Machine() bool { return causeVerdicts[c].machine }

// Fatal reports whether the user must act, because other flags or a second try do not help.
func (e *ExitError) Fatal() bool { return causeVerdicts[e.Cause].fatal || classVerdicts[e.Class].fatal }

// Remedy returns what a user can do about a failure; "" if no remedy is known.
func Remedy(class Class, cause Cause) string {
	if cause != "" {
		return causeVerdicts[cause].remedy
	}
	return classVerdicts[class].remedy
}

// Words returns the name of a failure: its class, and its cause if that is known.
func Words(class Class, cause Cause) string {
	if cause == "" {
		return string(class)
	}
	return fmt.Sprintf("%s (%s)", class, cause)
}
