package kubelab

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
)

// An Image is a directory with what a container's image adds to the files of this machine.
type Image string

// MakeImage makes an image. files gives the file on this machine for each path in the image. The user runs the containers
// of the image, and entrypoint is the command of those that have none.
func (c *Cluster) MakeImage(t testing.TB, files map[string]string, user int, entrypoint ...string) Image {
	t.Helper()
	dir := t.TempDir()
	config, err := json.Marshal(map[string]any{"User": user, "Entrypoint": entrypoint})
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "config.json"), config, 0o644)
	}
	for path, source := range files {
		err = errors.Join(err, copyProgram(source, filepath.Join(dir, "rootfs", path)))
	}
	if err != nil {
		t.Fatalf("make an image: %v", err)
	}
	return Image(dir)
}

// TunerImage returns the image that the Dockerfile of the project makes.
func (c *Cluster) TunerImage(t testing.TB) Image {
	t.Helper()
	return c.MakeImage(t, map[string]string{"tuner": c.Tuner}, 65532, "/tuner")
}

func copyProgram(source, target string) (err error) {
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	from, err := os.Open(source)
	if err != nil {
		return err
	}
	defer from.Close()
	to, err := os.OpenFile(target, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o755)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, to.Close()) }()
	_, err = io.Copy(to, from)
	return err
}
