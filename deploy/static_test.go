package deploy

import (
	"bytes"
	"context"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// buildStatic builds the static binary with the Makefile's recipe, which the Dockerfile uses too.
func buildStatic(t *testing.T, binary, version string) {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skipf("a static binary is built on Linux, this is %s", runtime.GOOS)
	}
	// go test keeps a test's result until a file changes that the test itself has opened. make opens these files in
	// another process, so the test opens them too.
	for _, watched := range []string{"../Makefile", "../go.mod", "../cmd/tuner"} {
		file, err := os.Open(watched)
		must(t, err)
		file.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // with an empty build cache SQLite is compiled: 76 s of CPU time
	defer cancel()
	build := exec.CommandContext(ctx, "make", "-C", "..", "static", "VERSION="+version, "STATIC="+binary)
	// If make runs this test, its flags are in the environment. They are not for the make that is started here.
	build.Env = slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "MAKE") || strings.HasPrefix(variable, "MFLAGS")
	})
	var output bytes.Buffer
	build.Stdout, build.Stderr = &output, &output
	build.WaitDelay = 10 * time.Second // a compiler that make has left running would keep the pipe open
	if err := build.Run(); err != nil {
		t.Fatalf("make static: %v\n%s", err, &output)
	}
	// The linker warns if a function still needs glibc's shared libraries.
	if strings.Contains(output.String(), "warning:") {
		t.Errorf("make static warns:\n%s", &output)
	}
}

// staticVersion is the version of the binary that the test builds.
const staticVersion = "v0.0.0-static-test"

// The static binary runs in any container: it needs no file, and it asks nvidia-smi for the GPUs. One test checks both,
// because linking the binary takes a second of CPU time.
func TestStaticBinary(t *testing.T) {
	binary := filepath.Join(t.TempDir(), "tuner")
	buildStatic(t, binary, staticVersion)
	t.Run("asks nvidia-smi", func(t *testing.T) { asksNvidiaSMI(t, binary) })
	t.Run("needs nothing of its container", func(t *testing.T) { needsNothingOfItsContainer(t, binary) })
}

// asksNvidiaSMI checks that tuner doctor reports the GPU that nvidia-smi names. The tuner runs nvidia-smi because a
// static binary that loads NVIDIA's library dies of SIGSEGV on machines with a GPU. The tests of serverctl/gpu have an
// nvidia-smi that hangs, crashes, or answers with garbage.
func asksNvidiaSMI(t *testing.T, binary string) {
	dir := t.TempDir()
	script := "#!/bin/sh\ncase \"$1\" in --query-gpu=*)\n" +
		"echo 0, GPU-1, 580.173.02, 143771, 0, 143158, 0, 76.12, 700.00, 345, 3201, 29, 0x1, Disabled, NVIDIA H200;; esac\n"
	must(t, os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte(script), 0o755))
	doctor := exec.CommandContext(t.Context(), binary, "doctor", "--gpus", "0") // 0 also lets a machine with few cores pass
	doctor.Env = []string{"PATH=" + dir + ":/usr/bin:/bin"}
	out, err := doctor.CombinedOutput()
	if want := "139.8 GiB of 140.4 GiB free"; err != nil || !strings.Contains(string(out), want) {
		t.Errorf("tuner doctor ends with %v, want %q in its report:\n%s", err, want, out)
	}
}

func needsNothingOfItsContainer(t *testing.T, binary string) {
	file, err := elf.Open(binary)
	must(t, err)
	defer file.Close()
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			t.Error("the binary asks for a dynamic loader (PT_INTERP)")
		}
	}
	libraries, err := file.ImportedLibraries()
	must(t, err)
	if len(libraries) > 0 {
		t.Errorf("the binary needs the shared libraries %q", libraries)
	}

	if os.Geteuid() != 0 {
		t.Skip("only root can run the binary in a root directory without other files")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	run := exec.CommandContext(ctx, "/tuner", "--version")
	run.Dir, run.Env = "/", []string{}
	run.SysProcAttr = &syscall.SysProcAttr{Chroot: filepath.Dir(binary)}
	output, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("tuner --version in a root directory without other files: %v\n%s", err, output)
	}
	if !strings.Contains(string(output), staticVersion) {
		t.Errorf("tuner --version says %q, want %s in it", output, staticVersion)
	}
}
