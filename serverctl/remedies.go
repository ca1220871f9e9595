package serverctl

import "fmt"

// What a user can do about a failure, by its cause, or by its class where no more is known. Only what is known to help stands
// here: a wrong remedy costs a day. Empty words mean that there is none.
var (
	causeRemedies = map[Cause]string{
		EngineDead:    "", // the evidence says what it died of
		ExitZero:      "see `tuner logs` for what ended the server; no flag does",
		IllegalAccess: "", // a kernel's error: the search avoids the point
		NCCL:          "run the server with NCCL_DEBUG=INFO in server.env; /dev/shm too small and broken links between GPUs are the usual reasons",
		DiskFull:      "free the disk, or /dev/shm, that the line names",
		TooManyFiles:  "raise the limit of open files (ulimit -n)",
		TooManyProc:   "raise the limit of processes (ulimit -u, or the cgroup's pids.max)",
		GatedModel:    "ask for access to the model, and set HF_TOKEN in server.env",
		Profiling:     "let no other process use the GPU while a server starts",
		SlowDisk:      "raise server.start_timeout, or set server.model_copy",
		OthersMemory:  "see nvidia-smi for who holds the GPU's memory, and end it",
		NoToken:       "",
		Deaf:          "",
		NotDrained:    "",

		Terminated:  "find out who ends the server: a person, a job scheduler, a service manager",
		Killed:      "find out who kills the server's processes; the kernel's log (dmesg) names those that it killed itself",
		HostOOM:     "give the machine, or the container's memory limit, more memory",
		Segfault:    "", // native code's error: the search avoids the point
		BusError:    "look whether /dev/shm is full, and whether the disk that holds the weights can be read",
		Driver:      "see whether nvidia-smi, or rocm-smi, works where the server runs: GPU, driver, and CUDA or ROCm must fit each other",
		Command:     "mend server.command: run it by hand in server.dir to see what it lacks",
		Compiler:    "install the compiler that the line names (gcc, nvcc, ninja) with its headers, where the server runs",
		NotAllowed:  "let this user read or write what the line names",
		DiskError:   "look at the disk, or the NFS server, that holds the file",
		Hub:         "download the model first and give its folder as server.model, or let the machine reach the hub",
		Damaged:     "download the model's weights again: a file is cut off or damaged",
		RemoteCode:  "if you trust the model's code, add --trust-remote-code to server.args",
		Unsupported: "take a version of vLLM that knows this model's architecture",
		SameWords:   "mend what the words say, then run the study again: nothing of it is lost",
	}

	classRemedies = map[Class]string{
		FlagsRejected:  "", // argparse and pydantic say what is wrong
		OOMStart:       "",
		KVTooSmall:     "",
		StartCrash:     "",
		OOMLoad:        "",
		CrashLoad:      "",
		Hang:           "",
		StartTimeout:   "raise server.start_timeout if the server was still at work",
		PortTaken:      "",
		ModelNotFound:  "give server.model as a folder with config.json and the weights, or as a name on the hub",
		Infrastructure: "",
		Aborted:        "",

		AcceptanceNearZero: "",
		ClientLimited:      "give tuner cores that the server does not use: its load generator was late",
	}
)

// Remedy returns what a user can do about a failure; "" where nothing is known to help.
func Remedy(class Class, cause Cause) string {
	if cause != "" {
		return causeRemedies[cause]
	}
	return classRemedies[class]
}

// Words name a failure by its class, with the cause where one is known.
func Words(class Class, cause Cause) string {
	if cause == "" {
		return string(class)
	}
	return fmt.Sprintf("%s (%s)", class, cause)
}
