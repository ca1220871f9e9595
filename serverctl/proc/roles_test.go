package proc

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	// roleVariable tells the test binary to act as another process instead of running the tests.
	roleVariable = "PROC_TEST_ROLE"
	// groupsVariable set to "off" keeps a role from using cgroups.
	groupsVariable = "PROC_TEST_CGROUPS"
)

// The role headless ends its main thread. Only an init function can lock the goroutine to that thread.
func init() {
	if os.Getenv(roleVariable) == "headless" {
		runtime.LockOSThread()
	}
}

func TestMain(m *testing.M) {
	Main()
	if os.Getenv(groupsVariable) == "off" {
		home.newGroup = noGroup
	}
	if role := os.Getenv(roleVariable); role != "" {
		if err := play(role); err != nil {
			fmt.Println("role", role, "failed:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	orphanGrace, tellLimit = orphanGrace/5, tellLimit/5 // shorter, because many tests wait for the whole time
	os.Exit(m.Run())
}

func noGroup(string) (cgroup, error) { return "", errors.New("this test does without cgroups") }

// lifetime is how long a role lives before it ends by itself, so that a failing test leaves nothing behind for long.
const lifetime = time.Minute

func play(role string) error {
	role, arg, _ := strings.Cut(role, " ")
	var err error
	switch role {
	case "polite": // SIGTERM ends it, as it does by default
	case "stubborn":
		signal.Ignore(syscall.SIGTERM)
	case "brief": // this process outlives its parent, but not for long
		fmt.Println("ready")
		time.Sleep(20 * time.Millisecond)
		return nil
	case "exit":
		var code int
		code, err = strconv.Atoi(arg)
		fmt.Println("last words")
		if err == nil {
			os.Exit(code)
		}
	case "listen":
		var l net.Listener
		if l, err = net.Listen("tcp", "127.0.0.1:"+arg); err == nil {
			defer l.Close()
		}
	case "flood":
		return flood(arg)
	case "headless": // the main thread ends, and the other threads live on
		fmt.Println("ready")
		time.AfterFunc(lifetime, func() { os.Exit(0) })
		syscall.Syscall(syscall.SYS_EXIT, 0, 0, 0)
	case "family", "abandon", "daemonise", "daemonise-later", "bear-and-exit", "bear-marked-and-exit", "nest", "nested", "zombies", "zombie-maker", "hoppers", "hop":
		var stays bool
		if stays, err = playParent(role, arg); !stays && err == nil {
			return nil
		}
	case "own", "own-twice", "own-unready", "own-untold", "own-orderly":
		err = playOwner(role, arg)
	case "init":
		return playInit()
	default:
		return errors.New("there is no such role")
	}
	if err != nil {
		return err
	}
	fmt.Println("ready")
	time.Sleep(lifetime)
	return nil
}

// playParent plays the roles that have children. It reports whether the role goes on living.
func playParent(role, arg string) (stays bool, err error) {
	switch role {
	case "family": // this parent has two stubborn children: one in the same session, and one outside
		return true, errors.Join(bear("stubborn", inSession), bear("stubborn", leaving))
	case "abandon": // this parent dies and leaves a stubborn child
		return false, bear("stubborn", inSession)
	case "daemonise": // the daemon of this parent leaves the session, clears its environment, and loses its parent
		return true, command("bear-and-exit stubborn", clean).Run()
	case "daemonise-later": // waits for SIGUSR1; its argument is the role that starts the daemon
		told := make(chan os.Signal, 1)
		signal.Notify(told, syscall.SIGUSR1)
		fmt.Println("waiting")
		<-told
		return true, command(arg, leaving).Run()
	case "bear-and-exit":
		return false, bear(arg, clean)
	case "bear-marked-and-exit":
		return false, bear(arg, leaving)
	case "nest": // as in the role daemonise, but the daemon's parent stays alive
		return true, bear("nested", clean)
	case "nested":
		return true, bear("stubborn", clean)
	case "zombies": // this parent waits for none of its children
		return true, errors.Join(bearZombie(), bearZombie(), bearZombie())
	case "zombie-maker": // this parent makes orphans that die, over and over
		fmt.Println("ready")
		for end := time.Now().Add(lifetime); time.Now().Before(end); {
			if err := command("bear-and-exit brief", clean).Run(); err != nil {
				return false, err
			}
			fmt.Println("made one")
		}
		return false, nil
	case "hoppers":
		end := strconv.FormatInt(time.Now().Add(lifetime).UnixMilli(), 10)
		for range 4 {
			err = errors.Join(err, command("hop "+end, clean).Start())
		}
		return true, err
	case "hop": // each process is short-lived, but there is always a next one
		end, err := strconv.ParseInt(arg, 10, 64)
		if err != nil || time.Now().UnixMilli() > end {
			return false, err
		}
		time.Sleep(5 * time.Millisecond)
		return false, command("hop "+arg, clean).Start()
	}
	return false, errors.New("there is no such parent")
}

// bearZombie starts a child that exits at once, and never reaps it.
func bearZombie() error {
	cmd := command("exit 0", inSession)
	if err := cmd.Start(); err != nil {
		return err
	}
	for end := time.Now().Add(waitLimit); alive(cmd.Process.Pid); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			return errors.New("a child does not end")
		}
	}
	return nil
}

// flood writes the given number of MiB. It writes without end if the argument is not a number.
func flood(mebibytes string) error {
	n, err := strconv.Atoi(mebibytes)
	if err != nil {
		n = int(^uint(0) >> 1)
	}
	block := bytes.Repeat([]byte("all work and no play\n"), 1<<20/21)
	for range n {
		if _, err := os.Stdout.Write(block); err != nil {
			return err
		}
	}
	return nil
}

// A report is what an owner tells the test about itself.
type report struct {
	Records  []Record
	Members  []int
	Watchdog int
}

// playOwner plays an owner: a tuner that will be killed.
func playOwner(role, arg string) error {
	switch role {
	case "own-untold": // this owner is killed while it forks: the watchdog knows a token but no PID
		return dieForking()
	case "own-unready": // this owner is killed as soon as it has forked
		p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ(arg)})
		if err != nil {
			return err
		}
		r := report{Records: []Record{p.Record()}, Watchdog: home.watchdog.pid()}
		return errors.Join(tell(r), syscall.Kill(os.Getpid(), syscall.SIGKILL))
	case "own-orderly":
		p, err := startReady(arg)
		if err != nil {
			return err
		}
		r := report{Records: []Record{p.Record()}, Watchdog: home.watchdog.pid()}
		if err := errors.Join(p.Stop(context.Background(), time.Second), tell(r)); err != nil {
			return err
		}
		os.Exit(0)
	}
	p, err := startReady(arg)
	if err != nil {
		return err
	}
	r := report{Records: []Record{p.Record()}}
	r.Members, err = p.Members()
	if role == "own-twice" { // the first watchdog of this owner has died
		first := home.watchdog.pid()
		err = errors.Join(err, syscall.Kill(first, syscall.SIGKILL))
		for end := time.Now().Add(waitLimit); alive(first) && time.Now().Before(end); {
			time.Sleep(time.Millisecond)
		}
		second, startErr := startReady(arg)
		if err := errors.Join(err, startErr); err != nil {
			return err
		}
		r.Records = append(r.Records, second.Record())
		var members []int
		members, err = second.Members()
		r.Members = append(r.Members, members...)
	}
	r.Watchdog = home.watchdog.pid()
	return errors.Join(err, tell(r))
}

func tell(r report) error { return json.NewEncoder(os.Stdout).Encode(r) }

// dieForking does what Start does until a child exists, and then dies. The child lives on.
func dieForking() error {
	record, err := newRecord()
	if err != nil {
		return err
	}
	p := &Process{record: record}
	home.begin(p)
	cmd := command("stubborn", leaving)
	cmd.Env = append(cmd.Env, TokenVariable+"="+record.Token)
	out, err := cmd.StdoutPipe()
	if err := errors.Join(err, cmd.Start()); err != nil {
		return err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return err
	}
	r := report{Records: []Record{p.record}, Members: []int{cmd.Process.Pid}, Watchdog: home.watchdog.pid()}
	return errors.Join(tell(r), syscall.Kill(os.Getpid(), syscall.SIGKILL))
}

// A manner says how a child is started.
type manner int

const (
	inSession manner = iota // the default
	leaving                 // the child leaves the session
	clean                   // the child leaves the session and clears its environment
)

func command(role string, m manner) *exec.Cmd {
	cmd := exec.Command(os.Args[0])
	cmd.Env = environ(role)
	if m == clean {
		cmd.Env = []string{roleVariable + "=" + role, quickExit}
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: m != inSession}
	return cmd
}

// bear starts a child in a role, and waits for its first line of output. It does not read to the end, because
// grandchildren may hold the pipe.
func bear(role string, m manner) error {
	cmd := command(role, m)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	_, err = bufio.NewReader(out).ReadString('\n')
	return err
}

// quickExit keeps the race detector from sleeping for a second when a process ends.
const quickExit = "GORACE=atexit_sleep_ms=0"

// environ returns the environment for a process that plays a role.
func environ(role string) []string {
	return append(os.Environ(), roleVariable+"="+role, quickExit)
}

// output collects what a process writes.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// waitLimit is how long a test waits for an event that must happen. It is long, because two busy cores are slow.
const waitLimit = 45 * time.Second

// startReady starts a process that plays a role, and waits until it is ready.
func startReady(role string) (*Process, error) {
	var out output
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ(role), Output: &out})
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(waitLimit); !strings.Contains(out.String(), "ready"); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			return nil, fmt.Errorf("role %s is not ready; it says %q", role, out.String())
		}
	}
	return p, nil
}

// start starts a process that plays a role, and waits until its output contains want.
func start(t *testing.T, role, want string) *Process {
	t.Helper()
	p, _ := startTalking(t, role, want)
	return p
}

func startTalking(t *testing.T, role, want string) (*Process, *output) {
	t.Helper()
	var out output
	p, err := Start(Spec{Argv: []string{os.Args[0]}, Env: environ(role), Output: &out})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Stop(context.Background(), 0) }) // a test that has called Stop itself has already seen the error
	eventually(t, "process says "+want, func() bool { return strings.Contains(out.String(), want) })
	return p, &out
}

func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(waitLimit); !is(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("waited %v for: %s", waitLimit, what)
		}
	}
}

func alive(pid int) bool {
	s, err := readStat(pid)
	return err == nil && !s.dead()
}

// members returns the PIDs of the processes in p's tree, and fails the test if it cannot read them.
func members(t *testing.T, p *Process) []int {
	t.Helper()
	pids, err := p.Members()
	if err != nil {
		t.Fatal(err)
	}
	return pids
}

// neighbour starts a process outside every tree, as another part of the program or another user's shell would.
func neighbour(t *testing.T, cmd *exec.Cmd) int {
	t.Helper()
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait() // we killed it
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

// descendants returns every descendant of this process in /proc, zombies included, except the watchdog. As a child
// subreaper this process is the ancestor of every orphan too.
func descendants() ([]stat, error) {
	all, err := processes()
	if err != nil {
		return nil, err
	}
	var found []stat
	for _, s := range all {
		for at, steps := s, 0; at.parent != 0 && steps < len(all); at, steps = all[at.parent], steps+1 {
			if at.pid == home.watchdog.pid() {
				break
			}
			if at.parent == os.Getpid() {
				found = append(found, s)
				break
			}
		}
	}
	sortByPID(found)
	return found, nil
}

// nothingLeft fails the test when a descendant of this process is left, except the given PIDs.
func nothingLeft(t *testing.T, but ...int) {
	t.Helper()
	left, err := descendants()
	if err != nil {
		t.Fatal(err)
	}
	left = slices.DeleteFunc(left, func(s stat) bool { return slices.Contains(but, s.pid) })
	if len(left) > 0 {
		t.Errorf("left are %+v, want nothing", left)
	}
}

// inBothWays runs a test twice: with cgroups, if this machine allows them, and without.
func inBothWays(t *testing.T, test func(t *testing.T)) {
	t.Run("with a cgroup", func(t *testing.T) {
		if err := CgroupSupport(); err != nil {
			t.Skipf("there is no cgroup for a server here: %v", err)
		}
		test(t)
	})
	t.Run("by signals alone", func(t *testing.T) {
		withoutGroups(t)
		test(t)
	})
}

// If groupsOff is set, the owners that a test starts as processes use no cgroups either.
var groupsOff bool

func withoutGroups(t *testing.T) {
	groupsOff = true
	t.Cleanup(func() { groupsOff = false })
	useGroups(t, noGroup)
}

// useGroups replaces the function that makes cgroups until the test ends.
func useGroups(t *testing.T, newGroup func(string) (cgroup, error)) {
	t.Helper()
	home.newGroup = newGroup
	t.Cleanup(func() { home.newGroup = newCgroup })
}
