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
	// go test does not see which files make reads. The test reads them too, so that a change drops the cached result.
	for _, watched := range []string{"../Makefile", "../go.mod", "../cmd/tuner"} {
		file, err := os.Open(watched)
		if err != nil {
			t.Fatal(err)
		}
		file.Close()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute) // an empty cache means compiling SQLite
	defer cancel()
	build := exec.CommandContext(ctx, "make", "-C", "..", "static", "VERSION="+version, "STATIC="+binary)
	// A make that runs this test would pass its own flags on.
	build.Env = slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "MAKE") || strings.HasPrefix(variable, "MFLAGS")
	})
	var output bytes.Buffer
	build.Stdout, build.Stderr = &output, &output
	build.WaitDelay = 10 * time.Second // a compiler that outlives make keeps the pipe open
	if err := build.Run(); err != nil {
		t.Fatalf("make static: %v\n%s", err, &output)
	}
	// The linker warns if a function still needs glibc's shared libraries.
	if strings.Contains(output.String(), "warning:") {
		t.Errorf("make static warns:\n%s", &output)
	}
}

func TestStaticBinaryNeedsNothingOfItsContainer(t *testing.T) {
	const version = "v0.0.0-static-test"
	root := t.TempDir()
	binary := filepath.Join(root, "tuner")
	buildStatic(t, binary, version)

	file, err := elf.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	for _, segment := range file.Progs {
		if segment.Type == elf.PT_INTERP {
			t.Error("the binary asks for a dynamic loader (PT_INTERP)")
		}
	}
	libraries, err := file.ImportedLibraries()
	if err != nil {
		t.Fatal(err)
	}
	if len(libraries) > 0 {
		t.Errorf("the binary needs the shared libraries %q", libraries)
	}

	if os.Geteuid() != 0 {
		t.Skip("only root can run the binary in an empty root directory")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	run := exec.CommandContext(ctx, "/tuner", "--version")
	run.Dir, run.Env = "/", []string{}
	run.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
	output, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("tuner --version in an empty root directory: %v\n%s", err, output)
	}
	if !strings.Contains(string(output), version) {
		t.Errorf("tuner --version says %q, want %s in it", output, version)
	}
}
