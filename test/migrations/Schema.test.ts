// SPDX-License-Identifier: AGPL-3.0-or-later
/** migrations/schema.sql is what the migrations make. */
import { assert, layer } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as fs from "node:fs"
import { directory } from "../../layers/Migrations.ts"
import * as SchemaDump from "../../layers/SchemaDump.ts"
import * as Database from "../support/Database.ts"

layer(Database.fresh(), { excludeTestServices: true })("the schema", (it) => {
  it.effect("is written down in schema.sql (npm run codegen writes it)", () =>
    Effect.gen(function* () {
      const written = fs.readFileSync(new URL("schema.sql", directory), "utf8")
      assert.strictEqual(yield* SchemaDump.dump, written)
    })
  )
})
