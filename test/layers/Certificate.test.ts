// SPDX-License-Identifier: AGPL-3.0-or-later
/** The certificate an installation makes for itself, and the ones it is given. */
import { assert, describe, it } from "@effect/vitest"
import { createPrivateKey, generateKeyPairSync, X509Certificate } from "node:crypto"
import { mkdtempSync, readdirSync, rmSync, statSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import * as Effect from "effect/Effect"
import * as TestClock from "effect/testing/TestClock"
import { load, selfSigned } from "../../layers/Certificate.ts"
import type { Files } from "../../layers/Certificate.ts"

const directory = Effect.acquireRelease(
  Effect.sync(() => mkdtempSync(join(tmpdir(), "pepsi-cert-"))),
  (path) => Effect.sync(() => rmSync(path, { recursive: true }))
)

const fault = (files: Files) =>
  Effect.map(Effect.flip(load(files)), (error) => [error.reason, error.file])

const hostname = "mail.pepsi.test"

describe("selfSigned", () => {
  it.effect("makes one certificate for ten years, readable by nobody else, and keeps it", () =>
    Effect.gen(function* () {
      const dir = yield* directory
      yield* TestClock.setTime(Date.UTC(2026, 10, 30))
      const first = yield* selfSigned({ directory: dir, hostname })
      const cert = new X509Certificate(first.cert)
      assert.strictEqual(cert.checkHost(hostname), hostname)
      assert.strictEqual(cert.subject, `CN=${hostname}`)
      assert.isTrue(cert.verify(cert.publicKey))
      assert.isTrue(cert.checkPrivateKey(createPrivateKey(first.key)))
      assert.strictEqual(cert.publicKey.asymmetricKeyDetails?.namedCurve, "prime256v1")
      assert.deepStrictEqual(
        [cert.validFrom, cert.validTo],
        ["Nov 30 00:00:00 2026 GMT", "Nov 27 00:00:00 2036 GMT"]
      )
      assert.deepStrictEqual(readdirSync(dir), ["tls.pem"])
      assert.strictEqual(statSync(join(dir, "tls.pem")).mode & 0o777, 0o600)
      assert.deepStrictEqual(
        yield* selfSigned({ directory: dir, hostname: "other.example" }),
        first
      )
    }).pipe(Effect.scoped)
  )

  it.effect("is one for all who start at the same time", () =>
    Effect.gen(function* () {
      const dir = yield* directory
      const made = yield* Effect.all(
        Array.from({ length: 8 }, () => selfSigned({ directory: dir, hostname })),
        { concurrency: 8 }
      )
      assert.strictEqual(new Set(made.map(({ key }) => key)).size, 1)
      assert.deepStrictEqual(readdirSync(dir), ["tls.pem"])
    }).pipe(Effect.scoped)
  )

  it.effect("writes years beyond 2049 as they are", () =>
    Effect.gen(function* () {
      yield* TestClock.setTime(Date.UTC(2045, 0, 1))
      const { cert } = yield* selfSigned({ directory: yield* directory, hostname })
      assert.match(new X509Certificate(cert).validTo, /2054 GMT$/)
    }).pipe(Effect.scoped)
  )

  it.effect("says when it cannot be written", () =>
    Effect.gen(function* () {
      const error = yield* Effect.flip(selfSigned({ directory: "/nonexistent/place", hostname }))
      assert.strictEqual(error.message, "/nonexistent/place/tls.pem: cannot be written")
    })
  )
})

describe("load", () => {
  it.effect("takes a pair, and names the file at fault", () =>
    Effect.gen(function* () {
      const dir = yield* directory
      const own = yield* selfSigned({ directory: dir, hostname })
      const other = generateKeyPairSync("ec", { namedCurve: "P-256" }).privateKey.export({
        type: "pkcs8",
        format: "pem"
      })
      const put = (name: string, octets: string): string => {
        writeFileSync(join(dir, name), octets)
        return join(dir, name)
      }
      const [cert, key] = [put("cert", own.cert), put("key", own.key)]
      assert.deepStrictEqual(yield* load({ cert, key }), own)
      assert.deepStrictEqual(yield* fault({ cert: key, key }), ["no certificate", key])
      assert.deepStrictEqual(yield* fault({ cert, key: cert }), ["no private key", cert])
      const wrong = put("other", String(other))
      assert.deepStrictEqual(yield* fault({ cert, key: wrong }), [
        "key of another certificate",
        wrong
      ])
      assert.deepStrictEqual(yield* fault({ cert: join(dir, "none"), key }), [
        "cannot be read",
        join(dir, "none")
      ])
    }).pipe(Effect.scoped)
  )
})
