package serverctl

import (
	"strconv"
	"syscall"
)

// These patterns show that somebody ended the server, or one of its processes, from outside. In such a case the point
// (the server's flags) is not at fault.

var (
	// askedToEnd matches what an API server logs when somebody asks it to end: vllm/entrypoints/launcher.py (0.14.1),
	// launchers/launcher.py (0.32), vllm/v1/utils.py. During a start, the signal handler in setup_server raises
	// KeyboardInterrupt, which Python prints as the last line. An API server that ends because its engine died logs
	// other texts.
	askedToEnd = pattern(`Shutting down FastAPI HTTP server\.|\[shutdown\] API server: shutdown triggered|` +
		`Received KeyboardInterrupt, shutting down|^KeyboardInterrupt(?:: terminated)?$`)
	// engineAsked matches what an engine of 0.32 logs when it is asked to end (vllm/v1/engine/core.py). A failing API
	// server asks its engine in the same way, and logs its own reason later.
	engineAsked = pattern(`\[shutdown\] EngineCore: trigger received signal=\w+|WorkerProc was terminated`)
	// processDied matches a report that a process died: vllm/v1/engine/core_client.py,
	// vllm/v1/executor/multiproc_executor.py and ray_executor_v2.py, vllm/v1/utils.py. Group 1 is the exit code, or
	// minus the signal's number. Group 1 is empty for 0.14.1, which reports neither of them.
	processDied = pattern(`(?:proc|process|Process|RayWorkerProc|VllmWorkerProcess) .*died(?: unexpectedly| with exit code|,)(?:.*?(?:exit code:? ?)(-?\d+))?|` +
		`engine core exited unexpectedly`)
	// failedProcs matches the last log line of a start that failed because the engine died (vllm/v1/engine/utils.py).
	// In 0.14.1 this line leaves out killed processes.
	failedProcs = pattern(`Engine core initialization failed.*Failed core proc\(s\): \{(?:'[^']*': (-?\d+))?`)
	// shellsWord matches a shell's report about a child, such as: serve.sh: line 3: 4711 Killed    vllm serve …
	shellsWord = pattern(`^\S+: line \d+: +\d+ (Killed|Terminated)\b.*`)
)

// signalFailure returns the failure of a process that a signal ended, or nil if the process exited by itself. It takes
// the exit code, or minus the signal's number.
func signalFailure(code int, loaded bool, evidence string) *ExitError {
	if code > 128 { // a shell exits with 128 plus the signal of its child
		code = 128 - code
	}
	if code >= 0 {
		return nil
	}
	e := &ExitError{Class: Infrastructure, Evidence: evidence}
	switch syscall.Signal(-code) {
	case syscall.SIGKILL:
		e.Cause = Killed
	case syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP:
		e.Cause = Terminated
	case syscall.SIGBUS:
		e.Cause = BusError
	case syscall.SIGSEGV, syscall.SIGABRT, syscall.SIGILL, syscall.SIGFPE, syscall.SIGTRAP, syscall.SIGSYS:
		e.Class, e.Cause = StartCrash, Segfault
		if loaded {
			e.Class = CrashLoad
		}
	default:
		return nil
	}
	return e
}

// learnOutside keeps the first line that shows that somebody ended the server from outside. It keeps none if an earlier
// line shows a failure. It considers lines of every log level.
func (s *signs) learnOutside(text string, loaded bool) {
	if s.outside != nil || s.known != nil || s.exception != "" && (s.ofEngine || !loaded) {
		return
	}
	switch {
	case s.wrapper == "" && askedToEnd().MatchString(text):
		s.outside = &ExitError{Class: Infrastructure, Cause: Terminated, Evidence: shorten(text)}
	case engineAsked().MatchString(text):
		if s.asked == "" {
			s.asked = shorten(text)
		}
	default:
		s.outside = processEnd(text, loaded)
		if s.outside != nil && s.asked != "" && s.outside.Class == Infrastructure {
			s.outside.Cause, s.outside.Evidence = Terminated, s.asked
		}
	}
}

// processEnd returns the failure if a line reports the death of a process, and nil otherwise.
func processEnd(text string, loaded bool) *ExitError {
	if g := shellsWord().FindStringSubmatch(text); g != nil {
		return signalFailure(map[string]int{"Killed": -9, "Terminated": -15}[g[1]], loaded, shorten(text))
	}
	evidence := shorten(text)
	g := processDied().FindStringSubmatch(text)
	start := failedProcs().FindStringSubmatch(text)
	switch {
	case g == nil && start == nil:
		return nil
	case start != nil:
		evidence = "the engine ended during the start without a message"
		if g == nil {
			g = start
		}
	}
	if g[1] == "" {
		return &ExitError{Class: Infrastructure, Cause: Killed, Evidence: evidence}
	}
	code, err := strconv.Atoi(g[1])
	if err != nil {
		return nil
	}
	if start != nil {
		evidence += ": " + signalName(code)
	}
	if code == 0 { // on SIGTERM, a process of vLLM raises SystemExit, which gives exit code 0
		return &ExitError{Class: Infrastructure, Cause: Terminated, Evidence: evidence}
	}
	return signalFailure(code, loaded, evidence)
}

// signalName says how a process ended, such as "signal 9 (killed)" or "exit code 1".
func signalName(code int) string {
	if code < 0 {
		return "signal " + strconv.Itoa(-code) + " (" + syscall.Signal(-code).String() + ")"
	}
	return "exit code " + strconv.Itoa(code)
}
