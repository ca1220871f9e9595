package serverctl

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"vllmtuner/serverctl/gpu"
	"vllmtuner/serverctl/host"
	"vllmtuner/serverctl/proc"
)

// A Config says how to start one server.
type Config struct {
	Command []string          // the words before the model, such as vllm serve
	Model   string            // folder or name; the first argument after the command
	Args    []string          // the flags, without --host and --port
	Env     map[string]string // added to the tuner's own environment
	Unset   []string          // names of variables of the tuner's own environment that the server does not get, unless Env has them

	Port         int           // 0 means any free port; if the port is taken, another is used
	StartTimeout time.Duration // limit from exec to the first token; 0 means 20 minutes
	StopTimeout  time.Duration // time from SIGTERM to SIGKILL; 0 means 30 seconds
	HangTimeout  time.Duration // how long requests may run without a token; 0 means 60 seconds

	GPU              gpu.Source    // reports the GPUs' memory and activity; nil means that no GPU is queried
	GPUMemoryTimeout time.Duration // limit from the end of the last process until the GPUs' memory is free again; 0 means 60 seconds

	Secrets  []string                // values to hide in the log, besides those whose names show that they are secret
	APIKey   string                  // sent with every request, and given to the server as VLLM_API_KEY; never logged
	Log      io.Writer               // gets the full log without secrets; nil discards it
	OnRecord func(proc.Record) error // called when the server's process has started, before any request; may be nil
	Progress func(phase string)      // called with each new phase; may be nil

	limits  limits      // zero means defaultLimits; tests use shorter ones
	machine host.Reader // counts processes that the kernel killed for lack of memory
}

// limits are waits and counts that users need not set.
type limits struct {
	readyEvery     time.Duration // pause between two checks of a starting server
	healthEvery    time.Duration // pause between two checks of a ready server
	sampleEvery    time.Duration // pause between two readings of the server's counters
	healthTimeout  time.Duration // time limit of one check; a busy API server answers late
	healthFailures int           // failed checks in a row until the server counts as hanging
	drain          time.Duration // time in which a server without load must become idle
	resetPause     time.Duration // pause between two attempts to reset the prefix cache
	quiet          time.Duration // time without a token after which an idle server is asked for one; 0 means HangTimeout
}

var defaultLimits = limits{
	readyEvery:     200 * time.Millisecond,
	healthEvery:    500 * time.Millisecond,
	sampleEvery:    time.Second,
	healthTimeout:  5 * time.Second,
	healthFailures: 5,
	drain:          2 * time.Minute,
	resetPause:     300 * time.Millisecond,
}

// withDefaults returns the config with defaults in place of zero values, or an error that says what is wrong with the
// config.
func (c Config) withDefaults() (Config, error) {
	if len(c.Command) == 0 || c.Command[0] == "" {
		return c, errors.New("server.command is empty; give the command that starts the server, such as [vllm, serve]")
	}
	if c.Model == "" {
		return c, errors.New("the server's model is empty; give a folder or a name")
	}
	for _, arg := range c.Args {
		if name := flagName(arg); name == "--host" || name == "--port" {
			return c, fmt.Errorf("server.args holds %s, but the tuner chooses the address itself; remove it and use server.port", name)
		}
	}
	c.StartTimeout = cmp.Or(c.StartTimeout, 20*time.Minute)
	c.StopTimeout = cmp.Or(c.StopTimeout, 30*time.Second)
	c.HangTimeout = cmp.Or(c.HangTimeout, time.Minute)
	c.GPUMemoryTimeout = cmp.Or(c.GPUMemoryTimeout, time.Minute)
	c.limits = cmp.Or(c.limits, defaultLimits)
	c.limits.quiet = cmp.Or(c.limits.quiet, c.HangTimeout)
	return c, nil
}

func (c Config) progress(format string, args ...any) {
	if c.Progress != nil {
		c.Progress(fmt.Sprintf(format, args...))
	}
}

// argv returns the whole command line.
func (c Config) argv(program string, port int) []string {
	return slices.Concat([]string{program}, c.Command[1:], []string{c.Model}, c.Args,
		[]string{"--host", "127.0.0.1", "--port", strconv.Itoa(port)})
}

// environ returns the server's environment. Later sources override earlier ones: useful defaults, the tuner's own
// environment, the variables that the tuner needs, the user's settings.
func (c Config) environ() []string {
	env := map[string]string{
		"NO_COLOR":                    "1",
		"PYTHONUNBUFFERED":            "1",                                              // otherwise the last words of a dying process are lost
		"PYTHONFAULTHANDLER":          "1",                                              // otherwise vLLM 0.14.1 reports a SIGSEGV of the engine like a SIGKILL
		"VLLM_DISABLE_LOG_LOGO":       "1",                                              // with this setting, vLLM 0.33 logs its version as a line
		"VLLM_ENGINE_READY_TIMEOUT_S": strconv.Itoa(int(c.StartTimeout.Seconds()) + 60), // our own timeout must end a start first
	}
	for _, variable := range os.Environ() {
		if name, value, _ := strings.Cut(variable, "="); !slices.Contains(c.Unset, name) {
			env[name] = value
		}
	}
	env["VLLM_SERVER_DEV_MODE"] = "1" // /reset_prefix_cache needs this mode; the server listens on the loopback interface only
	if c.APIKey != "" {
		env["VLLM_API_KEY"] = c.APIKey
	}
	maps.Copy(env, c.Env)
	list := make([]string, 0, len(env))
	for name, value := range env {
		list = append(list, name+"="+value)
	}
	slices.Sort(list)
	return list
}

// ownVariables has the variables that the tuner itself sets for a server, each with the reason.
var ownVariables = map[string]string{
	"NO_COLOR":                    "the tuner reads the server's log",
	"PYTHONUNBUFFERED":            "the tuner reads the server's log",
	"PYTHONFAULTHANDLER":          "the tuner reads from the log why a server died",
	"VLLM_DISABLE_LOG_LOGO":       "the tuner reads the server's version from the log",
	"VLLM_ENGINE_READY_TIMEOUT_S": "the tuner itself limits the time of a start (server.start_timeout)",
	"VLLM_SERVER_DEV_MODE":        "the tuner needs it to empty the prefix cache",
	"VLLM_API_KEY":                "the tuner's requests carry the same key",
	proc.TokenVariable:            "the tuner finds the server's processes by it",
	proc.TitleVariable:            "the tuner finds the server's processes by their environment",
}

// OwnVariable says why the tuner itself sets a variable for every server; "" if it does not.
func OwnVariable(name string) (why string) { return ownVariables[name] }

var (
	secretName = pattern(`(?i)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL)S?([_-]|$)`)

	// oftenSecret matches names that often hold a secret. Some of these names hold none: SSH_AUTH_SOCK holds a path.
	oftenSecret = pattern(`(?i)(PASS|PASSPHRASE|_PWD|COOKIES?)$|(^|[_-])(PASSPHRASE|AUTH|AUTHORIZATION|COOKIES?)([_-]|$)`)

	// harmless matches switches and numbers. Such values are not secret, whatever the name of the variable is.
	harmless = pattern(`^(?i:[0-9.]*|true|false|on|off|yes|no)$`)
)

// SecretName reports whether the value of an environment variable or flag with this name must be hidden.
func SecretName(name string) bool { return secretName().MatchString(name) }

// LikelySecret reports whether an environment variable probably holds a secret, by its name and value.
func LikelySecret(name, value string) bool {
	return !harmless().MatchString(value) && (SecretName(name) || oftenSecret().MatchString(name))
}

// A censor hides texts that nobody may read. The zero value hides nothing.
type censor struct {
	replacer *strings.Replacer
	longest  int // length of the longest secret, in bytes
}

func (s censor) hide(text string) string {
	if s.replacer == nil {
		return text
	}
	return s.replacer.Replace(text)
}

// newCensor returns a censor that hides the given texts. The longest text is replaced first, because one secret may be
// the beginning of another.
func newCensor(values []string) censor {
	const minLength = 6 // shorter values are not secret, and occur in too many harmless words
	values = slices.DeleteFunc(slices.Clone(values), func(v string) bool { return len(v) < minLength })
	if len(values) == 0 {
		return censor{}
	}
	slices.SortFunc(values, func(a, b string) int { return len(b) - len(a) })
	var pairs []string
	for _, value := range values {
		pairs = append(pairs, value, "[secret]")
	}
	return censor{strings.NewReplacer(pairs...), min(len(values[0]), maxLine)}
}

// censor returns a censor for the values that the server could print but nobody may read. vLLM logs its arguments,
// including keys.
func (c Config) censor(environ []string) censor {
	values := append([]string{c.APIKey}, c.Secrets...)
	for _, variable := range environ {
		if name, value, _ := strings.Cut(variable, "="); SecretName(name) || LikelySecret(name, value) {
			values = append(values, value)
		}
	}
	for i, arg := range c.Args {
		name, value, inline := strings.Cut(arg, "=")
		switch {
		case !strings.HasPrefix(name, "--") || !SecretName(name):
		case inline:
			values = append(values, value)
		default:
			for _, value := range c.Args[i+1:] { // --api-key takes several values
				if strings.HasPrefix(value, "-") {
					break
				}
				values = append(values, value)
			}
		}
	}
	return newCensor(values)
}

// Check returns an error if no server can be started with the config. It finds only faults that show without a start,
// such as a missing program or an address among the args.
func (c Config) Check() error {
	c, err := c.withDefaults()
	if err != nil {
		return err
	}
	_, err = c.program(c.environ())
	return err
}

// program finds the command's program in the server's own environment, or explains why it cannot be run.
func (c Config) program(environ []string) (string, error) {
	name := c.Command[0]
	if strings.ContainsRune(name, '/') {
		if err := executable(name); err != nil {
			return "", fmt.Errorf("server.command: %s cannot be run: %w", name, err)
		}
		return filepath.Abs(name)
	}
	var path string
	for _, variable := range environ {
		if value, ok := strings.CutPrefix(variable, "PATH="); ok {
			path = value
		}
	}
	for _, dir := range filepath.SplitList(path) {
		if file := filepath.Join(dir, name); executable(file) == nil {
			return filepath.Abs(file)
		}
	}
	return "", fmt.Errorf("server.command: %q: %w; give its full path, or set PATH in server.env: PATH=%s", name, exec.ErrNotFound, path)
}

func executable(path string) error {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return err
	case info.IsDir():
		return errors.New("it is a folder")
	case info.Mode()&0o111 == 0:
		return errors.New("it is not executable")
	}
	return nil
}
