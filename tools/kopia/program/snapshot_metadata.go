package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"strings"
	"time"

	"github.com/pkg/errors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
)

// The messages of the service SnapshotMetadata are few and small. Its module would bring in Kubernetes' API and another
// gRPC than kopia's.
// Source: kubernetes-csi/external-snapshot-metadata v1.1.0, proto/schema.proto.
const (
	allocatedMethod = "/snapshotmetadata.SnapshotMetadata/GetMetadataAllocated"
	deltaMethod     = "/snapshotmetadata.SnapshotMetadata/GetMetadataDelta"
	fixedLength     = 1
	variableLength  = 2
)

// retries is for a service that starts, and for a snapshot that it does not know as ready yet.
const retries = `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":4,"initialBackoff":"1s","maxBackoff":"4s",` +
	`"backoffMultiplier":2,"retryableStatusCodes":["UNAVAILABLE"]}}]}`

// changeQuery asks a driver which parts of a snapshot differ from the snapshot Base, or without one which are allocated.
type changeQuery struct {
	// Address is a host and a port, CA has certificates in PEM.
	Address string `json:"address"`
	CA      string `json:"ca"`
	Token   string `json:"token"`
	// Namespace and Snapshot name a VolumeSnapshot; Base is a handle of the storage.
	Namespace string `json:"namespace"`
	Snapshot  string `json:"snapshot"`
	Base      string `json:"base"`
	// TimeoutSeconds is for the whole answer.
	TimeoutSeconds float64 `json:"timeout_seconds"`
}

// ask returns which blocks of a device of that size the answer names. Any doubt about it is an error.
func (q *changeQuery) ask(ctx context.Context, size int64) (*markedBlocks, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(q.TimeoutSeconds*float64(time.Second)))
	defer cancel()

	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM([]byte(q.CA)) {
		return nil, errors.New("there is no certificate of its authority")
	}

	// The service is in the cluster: no proxy leads there, and no other kind of address is one.
	connection, err := grpc.NewClient("dns:///"+q.Address, grpc.WithNoProxy(), grpc.WithDefaultServiceConfig(retries),
		grpc.WithDisableServiceConfig(), grpc.WithDefaultCallOptions(grpc.ForceCodec(encoded{})),
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12})))
	if err != nil {
		return nil, err
	}
	defer connection.Close() //nolint:errcheck // nothing was written

	method, request := q.request()

	stream, err := connection.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, method)
	if err != nil {
		return nil, explain(err)
	}

	// The cause of an error follows when the answer is received.
	if err := stream.SendMsg(&request); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}

	if err := stream.CloseSend(); err != nil {
		return nil, err
	}

	return q.receive(stream, size)
}

func (q *changeQuery) receive(stream grpc.ClientStream, size int64) (*markedBlocks, error) {
	marked := &markedBlocks{size: size, set: make([]bool, blocks(size))}

	for {
		var message []byte

		err := stream.RecvMsg(&message)
		if errors.Is(err, io.EOF) {
			if q.Base == "" && marked.end == 0 {
				return nil, errors.New("nothing is allocated")
			}

			return marked, nil
		}

		if err != nil {
			return nil, explain(err)
		}

		found, err := decodeMetadata(message)
		if err != nil {
			return nil, errors.Wrap(err, "its answer is damaged")
		}

		if err := marked.add(found); err != nil {
			return nil, err
		}
	}
}

// explain returns the error of a call without what gRPC says about each of them, and about those that it repeated.
func explain(err error) error {
	found := status.Convert(err)
	message := found.Message()

	if _, last, repeated := strings.Cut(message, " desc = "); repeated {
		message = last
	}

	return errors.Errorf("%v: %v", found.Code(), message)
}

func (q *changeQuery) request() (string, []byte) {
	fields := []string{q.Token, q.Namespace, q.Snapshot}
	method := allocatedMethod

	if q.Base != "" {
		fields = []string{q.Token, q.Namespace, q.Base, q.Snapshot}
		method = deltaMethod
	}

	var request []byte

	for at, text := range fields {
		request = protowire.AppendTag(request, protowire.Number(at+1), protowire.BytesType)
		request = protowire.AppendString(request, text)
	}

	return method, request
}

// encoded is the codec of messages that are encoded already.
type encoded struct{}

func (encoded) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil } //nolint:forcetypeassert // ours

func (encoded) Unmarshal(data []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), data...) //nolint:forcetypeassert // ours

	return nil
}

func (encoded) Name() string { return "proto" }

// extent is a part of a device.
type extent struct{ offset, length int64 }

// metadata is a message of an answer.
type metadata struct {
	kind     uint64
	capacity int64
	extents  []extent
}

func decodeMetadata(message []byte) (*metadata, error) {
	found := &metadata{}

	return found, decodeFields(message, func(number protowire.Number, value uint64, content []byte) error {
		switch number {
		case 1:
			found.kind = value
		case 2:
			found.capacity = int64(value) //nolint:gosec // as it was encoded
		case 3:
			var one extent
			if err := decodeFields(content, one.take); err != nil {
				return err
			}

			found.extents = append(found.extents, one)
		}

		return nil
	})
}

func (e *extent) take(number protowire.Number, value uint64, _ []byte) error {
	switch number {
	case 1:
		e.offset = int64(value) //nolint:gosec // as it was encoded
	case 2:
		e.length = int64(value) //nolint:gosec // as it was encoded
	}

	return nil
}

// decodeFields calls take with each field; a number has no content, and a message no value.
func decodeFields(message []byte, take func(number protowire.Number, value uint64, content []byte) error) error {
	for len(message) > 0 {
		number, kind, count := protowire.ConsumeTag(message)
		if count < 0 {
			return protowire.ParseError(count)
		}

		message = message[count:]

		var (
			value   uint64
			content []byte
		)

		switch kind {
		case protowire.VarintType:
			value, count = protowire.ConsumeVarint(message)
		case protowire.BytesType:
			content, count = protowire.ConsumeBytes(message)
		default:
			count = protowire.ConsumeFieldValue(number, kind, message)
		}

		if count < 0 {
			return protowire.ParseError(count)
		}

		message = message[count:]

		if err := take(number, value, content); err != nil {
			return err
		}
	}

	return nil
}

// markedBlocks are the blocks of a device in which the extents of an answer lie. All its messages have one kind, and with
// a fixed length all extents have that.
type markedBlocks struct {
	size   int64
	set    []bool
	kind   uint64
	length int64
	end    int64
}

// add marks the blocks of one message, unless it breaks a rule of the protocol or the device has another size.
func (m *markedBlocks) add(found *metadata) error {
	if found.kind != fixedLength && found.kind != variableLength || m.kind != 0 && m.kind != found.kind {
		return errors.Errorf("it answers with blocks of the kind %v, after %v", found.kind, m.kind)
	}

	if m.kind = found.kind; found.capacity != m.size {
		return errors.Errorf("for it the volume has %v bytes, not %v", found.capacity, m.size)
	}

	for _, one := range found.extents {
		if one.length <= 0 || one.offset < m.end || one.length > m.size-one.offset {
			return errors.Errorf("it names %v bytes at %v, after %v of %v", one.length, one.offset, m.end, m.size)
		}

		if m.kind == fixedLength && m.length != 0 && m.length != one.length {
			return errors.Errorf("it names a block of %v bytes, and others of %v", one.length, m.length)
		}

		m.end, m.length = one.offset+one.length, one.length
		for at := one.offset / blockSize; at < int64(blocks(m.end)); at++ {
			m.set[at] = true
		}
	}

	return nil
}

// from marks all blocks from that one on.
func (m *markedBlocks) from(block int) {
	for at := max(0, block); at < len(m.set); at++ {
		m.set[at] = true
	}
}
